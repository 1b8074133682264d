"""Every metric of every service, declared once: name, kind, labels, help and buckets.

What a process counts (``metrics.py``), what ``/metrics`` shows and ``docs/metrics.md`` follow from
here. Names follow Prometheus' conventions (https://prometheus.io/docs/practices/naming/): base
units, ``_total`` behind counters. No label holds what a client wrote, so each has few values:
models and keys are the operator's, routes and reasons are those of the code.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PREFIX = "penstock_"

Kind = Literal["counter", "gauge", "histogram"]


class Metric(msgspec.Struct, frozen=True):
    """One metric. ``name`` lacks ``PREFIX``, which only what is shown has."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without the infinite one."""
    by_process: bool = False
    """Its sum over processes says nothing: shown with a ``process`` label, as ``frontend-0``, and
    only of living ones. The number goes to the next process of the service when one is gone."""
    unbounded: str = ""
    """The label whose values the operator chooses: where they are too many, further ones count as
    ``other``, and its other labels stay."""
    largest: bool = False
    """A gauge of which the largest of all processes counts, not their sum."""


_LATENCY = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_LATENCY = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02),
    *(0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)
_STEP_SECONDS = (0.0001, 0.0002, *_TOKEN_LATENCY, 10.0, 30.0)
_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
_TOKENS = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0),
    *(10_000.0, 20_000.0, 50_000.0, 100_000.0, 200_000.0, 500_000.0, 1_000_000.0),
)

ENGINE = (
    Metric("requests_running", "gauge", "Sequences in the running batch."),
    Metric(
        "requests_waiting",
        "gauge",
        "Sequences that wait for a place in the batch, by reason: new (never started), resumed "
        "(preempted or continued), grammar (their grammar is being compiled), blocks (what the "
        "keeper has of their prompt is being loaded), adapter (it is not on the device yet), "
        "suspect (a step failed with them; they run alone).",
        ("reason",),
    ),
    Metric("kv_blocks", "gauge", "KV blocks in all."),
    Metric("kv_blocks_used", "gauge", "KV blocks that running sequences hold."),
    Metric("kv_blocks_cached", "gauge", "KV blocks that nobody holds and the prefix cache finds."),
    Metric("kv_blocks_retained", "gauge", "KV blocks that requests have asked to retain."),
    Metric(
        "kv_usage_ratio",
        "gauge",
        "Share of the KV blocks that running sequences hold, of the engine where it is largest.",
        largest=True,
    ),
    Metric("prefix_cache_query_tokens_total", "counter", "Prompt tokens looked up in the cache."),
    Metric("prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache."),
    Metric("kv_retentions_cut_total", "counter", "KV blocks whose retention ended too early."),
    Metric("preemptions_total", "counter", "Sequences that lost their KV blocks to others."),
    Metric("adapters_loaded", "gauge", "Adapters that are loaded, on disk alone included."),
    Metric("adapters_resident", "gauge", "Adapters that are in a place on the device."),
    Metric("adapters_brought_total", "counter", "Adapters that were brought to the device."),
    Metric("adapters_evicted_total", "counter", "Adapters that left their place for another."),
    Metric(
        "adapters_not_brought_total",
        "counter",
        "Adapters that could not be brought to the device; who waited for them got an error.",
    ),
    Metric("prompt_tokens_total", "counter", "Prompt tokens of accepted requests, once for each."),
    Metric(
        "generation_tokens_total",
        "counter",
        "Tokens that engines have generated. What clients were told is usage_tokens_total.",
    ),
    Metric("steps_total", "counter", "Steps planned."),
    Metric(
        "spec_decode_draft_tokens_total",
        "counter",
        "Tokens that were drafted ahead and verified, by where they came from (own: the text "
        "itself, finished: outputs of the tenant, grammar: forced, eagle3: a head, draft-model) "
        "and by their place in the draft, from 0.",
        ("source", "position"),
    ),
    Metric(
        "spec_decode_accepted_tokens_total",
        "counter",
        "Of them, those that the model drew too.",
        ("source", "position"),
    ),
    Metric(
        "spec_decode_saved_seconds",
        "gauge",
        "What steps with drafts would have taken longer without, by measured steps without.",
    ),
    Metric("failed_steps_total", "counter", "Steps that raised or never came back."),
    Metric("step_seconds", "histogram", "Time of one step in the worker.", (), _STEP_SECONDS),
    Metric(
        "step_part_seconds_total",
        "counter",
        "Time of the parts of steps: plan, send, apply (take the result) and hand_out (the tokens, "
        "to tokenizers) in the scheduler; launch in the worker, in which a CPU computes the step.",
        ("part",),
    ),
    Metric("step_sequences", "histogram", "Sequences in one step.", (), _SEQUENCES),
    Metric("step_tokens", "histogram", "Tokens computed in one step.", (), _TOKENS),
    Metric(
        "request_queue_seconds",
        "histogram",
        "From a request's arrival at the frontend until an engine starts a choice of it.",
        (),
        _LATENCY,
    ),
    Metric(
        "request_prefill_seconds",
        "histogram",
        "From the start of a choice in its engine to its first token there.",
        (),
        _LATENCY,
    ),
    Metric(
        "request_decode_seconds",
        "histogram",
        "From the first token of a choice in its engine to its end there, whatever ended it.",
        (),
        _LATENCY,
    ),
    Metric("kv_tier_query_blocks_total", "counter", "Prompt blocks that KV memory lacked."),
    Metric("kv_tier_hit_blocks_total", "counter", "Blocks loaded from the keeper."),
    Metric("kv_tier_read_bytes_total", "counter", "Bytes loaded from the keeper."),
    Metric("kv_tier_stored_bytes_total", "counter", "Bytes stored with the keeper."),
    Metric("kv_tier_missed_stores_total", "counter", "Blocks lost for want of an empty slot."),
    Metric("kv_tier_loads_total", "counter", "Prefixes asked of the keeper."),
    Metric("kv_tier_load_seconds_total", "counter", "Time from asking to having them."),
    Metric("kv_tier_failed_loads_total", "counter", "Loads that failed or came too late."),
    Metric("kv_tier_slow_loads_total", "counter", "Prefixes computed, as that was quicker."),
    Metric("kv_tier_corrupted_total", "counter", "Stored blocks that were damaged."),
    Metric("kv_tier_failed_writes_total", "counter", "Blocks that the disk did not take."),
    Metric("kv_tier_skipped_writes_total", "counter", "Blocks lost, as the disk was behind."),
    Metric("hand_overs_total", "counter", "Requests handed over to engines that decode."),
    Metric("hand_overs_returned_total", "counter", "Given back, since there was no room."),
    Metric("hand_over_bytes_total", "counter", "Kept KV blocks of their prompts and outputs."),
    Metric("kv_tier_used_bytes", "gauge", "Bytes of the blocks kept in a tier.", ("tier",)),
    Metric("held_weights_bytes", "gauge", "Weights that outlive their worker.", ("place",)),
    Metric("held_weights_mapped_total", "counter", "Workers that mapped held weights."),
    Metric("engine_info", "gauge", "1 for each worker with a model.", ("device", "dtype")),
)
REQUESTS = (
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "From the arrival of a request to its first token.",
        (),
        _LATENCY,
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "Time between two tokens of one choice.",
        (),
        _TOKEN_LATENCY,
    ),
    Metric(
        "time_per_output_token_seconds",
        "histogram",
        "Of a request: mean time for a token behind the first one.",
        (),
        _TOKEN_LATENCY,
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "From the arrival of a request to its last token.",
        (),
        _LATENCY,
    ),
    Metric("request_prompt_tokens", "histogram", "Prompt tokens of a request.", (), _TOKENS),
    Metric(
        "request_generation_tokens", "histogram", "Tokens generated for a request.", (), _TOKENS
    ),
    Metric(
        "usage_tokens_total",
        "counter",
        "Tokens of requests that have ended, as their clients were told in usage, by kind: prompt, "
        "cached (of the prompt), completion.",
        ("model", "kind"),
        unbounded="model",
    ),
    Metric(
        "key_tokens_total",
        "counter",
        "The same by the name of the API key, prompt and completion. Without keys the name is "
        "empty.",
        ("key", "kind"),
        unbounded="key",
    ),
    Metric(
        "key_requests_total",
        "counter",
        "Requests that have ended, by API key. Like all tokens and latencies of requests, without "
        "those to tokenize or to count tokens, which no engine computes.",
        ("key",),
    ),
    Metric(
        "requests_finished_total",
        "counter",
        "Choices that ended, by reason: stop, length, abort, error, rejected.",
        ("reason",),
    ),
    Metric(
        "http_requests_total",
        "counter",
        "Answers to requests, over HTTP and on WebSockets: one on a WebSocket counts under the "
        "route and the status that HTTP would have given; 101 counts WebSockets that closed.",
        ("route", "status"),
    ),
    Metric("grpc_requests_total", "counter", "Answers to calls over gRPC.", ("method", "code")),
    Metric(
        "requests_limited_total",
        "counter",
        "Requests that a limit of their key refused: requests or tokens a minute, tokens a day, "
        "or concurrent ones.",
        ("limit",),
    ),
    Metric(
        "requests_shed_total",
        "counter",
        "Requests refused with 429 or 503 because the server was too busy or a part of it was not "
        "there, once each however often it was tried, by reason: wait (it would have waited too "
        "long), queue and tokens (limits on what waits), share (one tenant's part of the queue), "
        "unavailable, pipeline (refused behind the frontend).",
        ("reason",),
    ),
    Metric(
        "estimated_wait_seconds",
        "gauge",
        "How long a new request for the model would wait for an engine, by what waits and how "
        "fast requests end. It is what admission decides by, and a signal to scale on. It is 0 "
        "while nothing waits, and where no engine was ready yet: what waits for the first one has "
        "no estimate.",
        ("model",),
        largest=True,
    ),
)
PIPELINE = (
    Metric("queue_depth", "gauge", "Requests that wait at a hop of the pipeline.", ("hop",)),
    Metric(
        "queue_age_seconds",
        "gauge",
        "How long what waits at a hop of the pipeline has waited, of the process where it waits "
        "longest: at frontend for the event loop, at tokenizer for its event loop or to be "
        "encoded, at router for a process to send it to, at scheduler to be started. model is "
        "empty for frontends and the router.",
        ("hop", "model"),
        unbounded="model",
        largest=True,
    ),
    Metric(
        "encode_seconds",
        "histogram",
        "From a request's arrival at a tokenizer until its prompt is tokens, for an engine; what "
        "is refused there or only tokenized counts nowhere.",
        (),
        _LATENCY,
    ),
    Metric("hand_over_seconds", "histogram", "A request's pause at a hand-over.", (), _LATENCY),
    Metric(
        "requests_placed_total",
        "counter",
        "Requests placed on one of several engines, by reason: prefix (it has cached some of the "
        "prompt), load (those that have are too busy), room (none has).",
        ("reason",),
    ),
    Metric(
        "continuations_total",
        "counter",
        "Requests started again after a loss, by who did so: frontend (of a tokenizer), tokenizer "
        "(of an engine), either one where they waited at a router that was lost.",
        ("service",),
    ),
    Metric(
        "redraws_total",
        "counter",
        "Times that a request went back because one of its choices had completed a banned string.",
    ),
    Metric(
        "messages_sent_total",
        "counter",
        "Messages sent to other processes, the beats to the router excepted.",
        ("hop",),
    ),
    Metric("sent_bytes_total", "counter", "Bytes of these messages.", ("hop",)),
    Metric("outbox_bytes", "gauge", "Bytes that wait for slow peers.", by_process=True),
    Metric(
        "dropped_messages_total",
        "counter",
        "Messages dropped, by reason: unexpected, epoch (of another epoch of the engine), unsent "
        "(too long, or the peer takes none).",
        ("reason",),
    ),
    Metric("malformed_frames_total", "counter", "Frames that did not decode."),
)
PROCESSES = (
    Metric(
        "processes",
        "gauge",
        "Processes by service and phase, as the router knows them.",
        ("service", "phase"),
    ),
    Metric(
        "processes_lost_total",
        "counter",
        "Processes that ended without a word, fell silent or got stuck. The launcher starts each "
        "again. That of the router is always 0, since it is the router that counts: "
        "process_start_time_seconds tells when it began.",
        ("service",),
    ),
    Metric(
        "process_cpu_seconds_total",
        "counter",
        "CPU time of a process, all its threads.",
        by_process=True,
    ),
    Metric(
        "process_loop_cpu_seconds_total",
        "counter",
        "CPU time of the thread that runs a process's loop. One that grows by a second in a second "
        "has no room left.",
        by_process=True,
    ),
    Metric(
        "process_resident_memory_bytes",
        "gauge",
        "Memory of a process that is in RAM.",
        by_process=True,
    ),
    Metric(
        "process_start_time_seconds",
        "gauge",
        "When a process began, in seconds since 1970. It changes with each restart.",
        by_process=True,
    ),
    Metric(
        "model_awake",
        "gauge",
        "With --resident or --keep-alive: 1 while a model is awake, 0 while it sleeps, falls "
        "asleep or wakes.",
        ("model",),
        unbounded="model",
    ),
    Metric(
        "model_wakes_total",
        "counter",
        "Times that a model woke, by outcome: awake, failed.",
        ("model", "outcome"),
        unbounded="model",
    ),
    Metric(
        "model_wake_seconds",
        "histogram",
        "From the start of a model's engines until it is awake.",
        ("model",),
        _LATENCY,
        unbounded="model",
    ),
    Metric(
        "model_sleeps_total",
        "counter",
        "Times that a model fell asleep, by cause: wanted (another one was), keep_alive (nobody "
        "used it), asked (by an administrator).",
        ("model", "cause"),
        unbounded="model",
    ),
    Metric("build_info", "gauge", "1, with the version of the router.", ("version",)),
)
SECTIONS: tuple[tuple[str, tuple[Metric, ...]], ...] = (
    ("Engine (scheduler and worker)", ENGINE),
    ("Requests, as clients see them (frontend)", REQUESTS),
    ("The pipeline's hops", PIPELINE),
    ("Processes", PROCESSES),
)
METRICS: dict[str, Metric] = {metric.name: metric for _, part in SECTIONS for metric in part}
