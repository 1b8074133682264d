"""The prompts of a run, as the flags ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.loadtest.client.conversation_file import read_conversations
from penstock.loadtest.client.dataset_file import (
    BadDataset,
    read_jsonl,
    read_sharegpt,
    token_counter,
)
from penstock.loadtest.client.prompts import Prompt, RandomShape, random_prompts
from penstock.loadtest.client.replay import Recorded, Replay, read_trace
from penstock.loadtest.client.serve_options import DEFAULT_OUTPUT_LEN, ServeOptions
from penstock.loadtest.client.sessions import (
    AgentShape,
    Answer,
    Conversations,
    Form,
    agent_sessions,
    conversations,
    pool_of,
)

WARM_UP_LEN = 64
"""Tokens of a prompt to warm up with, where no flag says how long prompts are."""


class Source(Protocol):
    """Where the requests of a run come from. They are numbered session by session."""

    @property
    def arrivals(self) -> Sequence[float] | None:
        """Seconds from the start to each session; ``None``: the flags say."""

    @property
    def turns(self) -> Sequence[int]:
        """How many requests each session has."""

    @property
    def input_lens(self) -> Sequence[int | None]:
        """Tokens of each prompt, as far as known before the server counts them."""

    @property
    def output_lens(self) -> Sequence[int]:
        """Tokens asked for."""

    def prompt(self, index: int, answers: Sequence[Answer]) -> Prompt:
        """A request's prompt; ``answers``: those of its session's earlier ones."""


class Separate:
    """Prompts that have nothing to do with each other."""

    arrivals: Sequence[float] | None = None

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self.turns = [1] * len(prompts)
        self.input_lens = [one.input_len for one in prompts]
        self.output_lens = [one.output_len for one in prompts]

    def prompt(self, index: int, answers: Sequence[Answer]) -> Prompt:
        return self._prompts[index]

    def exact_lens(self) -> list[tuple[int, int]]:
        """Tokens in and out of the prompts that are token ids."""
        return [(one.input_len or 0, one.output_len) for one in self._prompts if one.is_ids]


class Workload:
    """``source``: what is measured; ``warmup``: other prompts, to warm up with."""

    def __init__(self, options: ServeOptions, *, chat: bool) -> None:
        """Raises ``BadDataset``."""
        self.notes: list[str] = []
        """What the reader of the results should know."""
        self._options = options
        self._form = _form(options, chat=chat)
        # Others than the measured ones: those would be in the server's prefix cache.
        self.warmup = _random(options, "warm-up", options.warmup_requests, self._form)
        self.source = self._source(chat)

    @property
    def sessions(self) -> int:
        return len(self.source.turns)

    @property
    def joins_ids(self) -> bool:
        """Whether later turns of a conversation are made of the token ids of its answers."""
        return isinstance(self.source, Conversations) and self.source.form == "ids"

    @property
    def prompts(self) -> list[Prompt]:
        """All that are no later turn of a conversation."""
        first, found = 0, []
        for turns in self.source.turns:
            found.append(self.source.prompt(first, ()))
            first += turns
        return found

    def check_lengths(self, max_model_len: int | None) -> None:
        """Refuse token prompts that the server must refuse, and leave those of a trace out. Raises
        ``BadDataset``."""
        if max_model_len is None:
            return
        source = self.source
        if isinstance(source, Replay):
            planned = self.sessions
            if not (kept := source.keep(max_model_len)):
                raise BadDataset(
                    f"{self._options.dataset_path}: every request is longer than the server's "
                    f"max_model_len of {max_model_len}"
                )
            if kept < planned:
                self.notes.append(
                    f"{planned - kept} of the trace's {planned} requests are longer than the "
                    f"server's max_model_len of {max_model_len} and were left out"
                )
        elif isinstance(source, Conversations | Separate):
            _refuse_longer(max_model_len, source.exact_lens())

    def _source(self, chat: bool) -> Source:
        options, form, count = self._options, self._form, self._options.num_prompts
        name = options.dataset_name
        if name == "trace":
            trace = read_trace(options.dataset_path, options.output_len or DEFAULT_OUTPUT_LEN)
            _check_form(trace[:count], chat=chat)
            return Replay(
                trace[:count], form, options.prompt_seed, speed=options.trace_speed,
                block=options.trace_block_size, vocab_size=options.vocab_size,
            )  # fmt: skip
        if name == "conversation" and options.dataset_path:
            return self._recorded_conversations()
        if name in ("conversation", "agent"):
            pool = pool_of(form, options.vocab_size)
            seed = options.prompt_seed
            if name == "conversation":
                made = conversations(count, options.turns, _shape(options), seed, pool)
                return Conversations(made, form)
            try:
                return Conversations(agent_sessions(count, _agents(options), seed, pool), form)
            except ValueError as error:
                raise BadDataset(
                    f"{error}; change --agent-prefix-hits, --agent-input-ratio, --turns, "
                    "--random-output-len or --random-prefix-len"
                ) from None
        if name == "random":
            return Separate(_random(options, "", count, form))
        found = _from_file(options)
        _check_form(found, chat=chat)
        self._note_repeated(count, len(found))
        self.warmup = [found[-1 - n % len(found)] for n in range(options.warmup_requests)]
        return Separate([found[n % len(found)] for n in range(count)])

    def _recorded_conversations(self) -> Source:
        options, count = self._options, self._options.num_prompts
        counter = token_counter(options.tokenizer)
        found = read_conversations(
            options.dataset_path, counter, options.output_len, DEFAULT_OUTPUT_LEN
        )
        self._note_repeated(count, len(found))
        form: Form = "chat" if self._form == "chat" else "text"
        return Conversations([found[n % len(found)] for n in range(count)], form, counted=False)

    def _note_repeated(self, asked: int, there: int) -> None:
        if asked > there:
            self.notes.append(
                f"{asked} requests were made of the {there} prompts of the file: "
                "repeated ones may be answered from the prefix cache"
            )


def _refuse_longer(max_model_len: int, lengths: Sequence[tuple[int, int]]) -> None:
    """Raises ``BadDataset``. lengths: tokens in and out of each prompt."""
    for inputs, outputs in lengths:
        if inputs + outputs > max_model_len:
            raise BadDataset(
                f"a prompt of {inputs} tokens and {outputs} to generate "
                f"are more than the server's max_model_len of {max_model_len}; "
                "ask for less, for example with --random-input-len and --random-output-len"
            )


def _form(options: ServeOptions, *, chat: bool) -> Form:
    if chat and options.random_format == "tokens":
        raise BadDataset(
            "--random-format tokens: a chat takes text; use --endpoint /v1/completions"
        )
    if chat:
        return "chat"
    return "text" if options.random_format == "text" else "ids"


def _shape(options: ServeOptions) -> RandomShape:
    return RandomShape(
        input_len=options.random_input_len,
        output_len=options.output_len or options.random_output_len or DEFAULT_OUTPUT_LEN,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
        prefix_count=options.random_prefix_count,
    )


def _agents(options: ServeOptions) -> AgentShape:
    shape = _shape(options)
    return AgentShape(
        output_len=shape.output_len,
        turns=options.turns[1],
        hit_share=options.agent_prefix_hits,
        input_ratio=options.agent_input_ratio,
        prefix_len=shape.prefix_len,
    )


def _random(options: ServeOptions, name: str, count: int, form: Form) -> list[Prompt]:
    seed = f"{name} {options.prompt_seed}" if name else options.prompt_seed
    shape = _shape(options)
    if options.dataset_name in ("agent", "trace"):
        shape = RandomShape(WARM_UP_LEN, 1)
    return random_prompts(count, shape, seed, vocab_size=options.vocab_size, as_text=form != "ids")


def _from_file(options: ServeOptions) -> list[Prompt]:
    count = token_counter(options.tokenizer)
    path = options.dataset_path
    if options.dataset_name == "sharegpt":
        return read_sharegpt(path, options.seed, count, options.output_len)
    return read_jsonl(path, count, options.output_len, DEFAULT_OUTPUT_LEN)


def _check_form(prompts: Sequence[Prompt | Recorded], *, chat: bool) -> None:
    """Messages go to a chat, token ids to completions, text to both."""
    for prompt in prompts:
        if prompt.is_messages and not chat:
            raise BadDataset("messages need --endpoint /v1/chat/completions")
        if prompt.is_ids and chat:
            raise BadDataset("prompts of token ids need --endpoint /v1/completions")
