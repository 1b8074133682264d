"""The prompts of a run, as the flags ask for them."""

from __future__ import annotations

from penstock.loadtest.dataset_file import BadDataset, read_jsonl, read_sharegpt, token_counter
from penstock.loadtest.prompts import Prompt, RandomShape, random_prompts
from penstock.loadtest.serve_options import DEFAULT_OUTPUT_LEN, ServeOptions


class Workload:
    """``prompts`` to measure, and others to warm up with."""

    def __init__(self, options: ServeOptions, *, chat: bool) -> None:
        """Raises ``BadDataset``."""
        self.note: str | None = None
        """What the reader of the results should know."""
        count, warmups = options.num_prompts, options.warmup_requests
        if options.dataset_name == "random":
            self.prompts = _random(options, options.seed, count, chat=chat)
            # Others than the measured ones: those would be in the server's prefix cache.
            self.warmup = _random(options, f"warm-up {options.seed}", warmups, chat=chat)
            return
        found = _from_file(options)
        _check_form(found, chat=chat)
        if count > len(found):
            self.note = (
                f"{count} requests were made of the {len(found)} prompts of the file: "
                "repeated ones may be answered from the prefix cache"
            )
        self.prompts = [found[n % len(found)] for n in range(count)]
        self.warmup = [found[-1 - n % len(found)] for n in range(warmups)]

    def check_lengths(self, max_model_len: int | None) -> None:
        """Refuse token prompts that the server must refuse. Raises ``BadDataset``."""
        for prompt in self.prompts if max_model_len is not None else ():
            asked = (prompt.input_len or 0) + prompt.output_len
            if prompt.is_ids and asked > (max_model_len or 0):
                raise BadDataset(
                    f"a prompt of {prompt.input_len} tokens and {prompt.output_len} to generate "
                    f"are more than the server's max_model_len of {max_model_len}; "
                    "ask for less, for example with --random-input-len and --random-output-len"
                )


def _random(options: ServeOptions, seed: int | str, count: int, *, chat: bool) -> list[Prompt]:
    shape = RandomShape(
        input_len=options.random_input_len,
        output_len=options.output_len or options.random_output_len or DEFAULT_OUTPUT_LEN,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
    )
    if chat and options.random_format == "tokens":
        raise BadDataset(
            "--random-format tokens: a chat takes text; use --endpoint /v1/completions"
        )
    as_text = options.random_format == "text" or chat
    return random_prompts(count, shape, seed, vocab_size=options.vocab_size, as_text=as_text)


def _from_file(options: ServeOptions) -> list[Prompt]:
    count = token_counter(options.tokenizer)
    path = options.dataset_path
    if options.dataset_name == "sharegpt":
        return read_sharegpt(path, options.seed, count, options.output_len)
    return read_jsonl(path, count, options.output_len, DEFAULT_OUTPUT_LEN)


def _check_form(prompts: list[Prompt], *, chat: bool) -> None:
    """Messages go to a chat, token ids to completions, text to both."""
    for prompt in prompts:
        if prompt.is_messages and not chat:
            raise BadDataset("messages need --endpoint /v1/chat/completions")
        if prompt.is_ids and chat:
            raise BadDataset("prompts of token ids need --endpoint /v1/completions")
