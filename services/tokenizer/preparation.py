"""From what a client asked for to what a scheduler needs: token ids and resolved parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.protocol.grammar.request import Grammar, conflict
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.prefix_digest import chain_root, extended
from penstock.protocol.sampling import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_PROMPT_LOGPROBS,
    SamplingParams,
    resolve,
    token_ids,
)
from penstock.protocol.tasks import GENERATE, OF_FOLDERS
from penstock.protocol.wire.messages.cache_hints import RetainedSpan
from penstock.protocol.wire.messages.requests import (
    TOKEN_BYTES,
    PoolingParams,
    Prompt,
    PromptText,
    Tokens,
    TokenWork,
    Work,
    prompts_of,
)
from penstock.protocol.wire.messages.steps import SlotSampling
from penstock.services.tokenizer.banned_strings import folded_strings
from penstock.services.tokenizer.breakpoints import retained_spans
from penstock.services.tokenizer.channel_grammar import Turn
from penstock.services.tokenizer.dry_breakers import breaker_tokens
from penstock.services.tokenizer.folder_tasks import FolderTasks
from penstock.services.tokenizer.grammar_check import GrammarCheck
from penstock.services.tokenizer.message_grammar import tells_messages
from penstock.services.tokenizer.output.family import Family
from penstock.services.tokenizer.prompt_encoding import (
    EncodedPrompts,
    check_vocabulary,
    encode,
    encode_inputs,
)
from penstock.services.tokenizer.prompt_error import PromptError, window_exceeded
from penstock.services.tokenizer.reading import Reading, check_names, family_of, reading_of
from penstock.services.tokenizer.slot_sampling import slot_sampling
from penstock.services.tokenizer.stop_strings import stop_automaton
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.tokenizer.thinking import channel_turn, thinking
from penstock.services.tokenizer.token_table import drops_first_blank
from penstock.services.tokenizer.tool_grammar import (
    Strictness,
    tool_grammar,
    within_budget,
)

MAX_STREAMED_ECHO = 8192
MAX_STREAMED_LOGPROBS = 2048
"""Tokens of a prompt that a stream may repeat, or send logprobs of: a connection's backlog must
stay below what a slow reader may have."""
QUICK_TOKENS = 4096
"""A prompt of so many ids, about 20 µs of work, is not worth a thread, …"""
QUICK_CHARACTERS = 512
"""… nor are texts of so many characters together. They take a tenth of a millisecond, which is what
it costs to wake a thread and to be woken by it; where others use the cores that takes many."""
MAX_BAD_WORD_TOKENS = 64
MAX_BAD_WORDS_TOKENS = 2048
"""What a worker has room for in a slot (``penstock.kernels.sampling.bad_words``)."""

__all__ = ["PromptError", "prepare"]


class Prepared(NamedTuple):
    """A request in tokens."""

    work: TokenWork
    """What the engine gets."""
    params: SamplingParams
    """Resolved; what the answer's text depends on stays in the tokenizer."""
    reading: Reading | None = None
    """How answers become events; ``None``: they are text."""
    pooling: PoolingParams | None = None
    """What the request asks of a task that the folder decides on."""


def _max_tokens(params: SamplingParams, work: Work, length: int, max_model_len: int) -> int:
    """How many tokens to generate at most. Raises ``PromptError`` if they do not fit and must, or
    if none and nothing of the prompt are asked for."""
    kind = work.head.prompt_kind
    room, asked = max_model_len - length, params.max_tokens
    if work.head.accepted and asked is not None:
        return asked  # resolved when it was new
    if asked is None:
        return room if kind == "chat" else min(DEFAULT_COMPLETION_TOKENS, room)
    scores = params.echo or params.prompt_logprobs is not None
    if asked == 0 and not scores and work.cache is None:
        wanted = "prompt_logprobs" if kind == "chat" else "echo or prompt_logprobs"
        raise PromptError(
            f"max_tokens is 0, which leaves nothing to answer: ask for at least 1, or for {wanted} "
            "too, or with cache_control for the prompt to be computed",
            "max_tokens",
        )
    if asked > room and not work.fits_window:
        raise window_exceeded(
            f"the prompt has {length} {'token' if length == 1 else 'tokens'} and max_tokens is "
            f"{asked}, together "
            f"{length + asked}; the maximum context length is {max_model_len} tokens "
            f"(--max-model-len): shorten the prompt or ask for at most {room}",
            "max_tokens",
        )
    return min(asked, room)


def _output_limit(params: SamplingParams, work: Work, length: int, max_model_len: int) -> int:
    """Tokens that are generated at most; 0 for other tasks. Raises ``PromptError``."""
    limit = 0
    if work.head.task == GENERATE:
        limit = _max_tokens(params, work, length, max_model_len)
    if params.min_tokens > limit:
        raise PromptError(
            f"min_tokens is {params.min_tokens}, but at most {limit} tokens are generated after "
            f"this prompt of {length}; ask for fewer",
            "min_tokens",
        )
    return limit


def _stop_ids(params: SamplingParams, info: ModelInfo) -> list[int]:
    for name, token in token_ids(params):
        if not 0 <= token < info.vocab_size:
            check_vocabulary(np.asarray([token]), info.vocab_size, name)
    ends = [] if params.ignore_eos else info.eos_token_ids
    return list(dict.fromkeys([*params.stop_token_ids, *ends]))


def _bad_words(params: SamplingParams, text_model: TextModel) -> list[bytes]:
    """Each word as it is written at the beginning of a text, and after a space."""
    words: list[bytes] = []
    for word in params.bad_words:
        forms = [text_model.encode(form, add_special_tokens=False) for form in (word, f" {word}")]
        if max(map(len, forms)) > TOKEN_BYTES * MAX_BAD_WORD_TOKENS:
            raise PromptError(
                f"bad_words: {word[:40]!r} has more than {MAX_BAD_WORD_TOKENS} tokens; "
                "send a shorter one",
                "bad_words",
            )
        words += (form for form in dict.fromkeys(forms) if form)
    if sum(map(len, words)) > TOKEN_BYTES * MAX_BAD_WORDS_TOKENS:
        raise PromptError(
            f"bad_words: the words have {sum(map(len, words)) // TOKEN_BYTES} tokens together, "
            f"each counted with and without a space before it; at most {MAX_BAD_WORDS_TOKENS}",
            "bad_words",
        )
    return words


def _check_any_allowed(params: SamplingParams, stop_ids: list[int], bad_words: list[bytes]) -> None:
    """Raise ``PromptError`` where the parameters leave no token that could come first."""
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids)
    left -= {int.from_bytes(word, "little") for word in bad_words if len(word) == TOKEN_BYTES}
    if params.min_tokens:
        left -= set(stop_ids)
    if not left:
        raise PromptError(
            "allowed_token_ids: every one of them is kept away by bad_words, or by min_tokens as "
            "an end or stop token; allow one more",
            "allowed_token_ids",
        )


def _check_prompt_details(work: Work, params: SamplingParams, length: int) -> None:
    """What comes of the prompts in an answer has a limit, a lower one in a stream."""
    head = work.head
    choices = f" in each of {head.siblings} choices" if head.siblings > 1 else ""
    if params.echo and head.streamed and length * head.siblings > MAX_STREAMED_ECHO:
        raise PromptError(
            f"echo: the prompt has {length} tokens{choices}; a stream gives back at most "
            f"{MAX_STREAMED_ECHO}: send stream: false, or leave echo out",
            "echo",
        )
    if params.prompt_logprobs is None:
        return
    listed = length * (1 + params.prompt_logprobs) * head.siblings
    most = MAX_STREAMED_LOGPROBS if head.streamed else MAX_PROMPT_LOGPROBS
    if listed > most:
        param = "echo" if head.streamed else "prompt_logprobs"
        raise PromptError(
            f"{param}: {length} prompt tokens with {params.prompt_logprobs} more at each place"
            f"{choices} are {listed} logprobs; at most {most}"
            f"{' in a stream' if head.streamed else ''}: ask for fewer, or shorten the prompt",
            param,
        )


def may_have_grammar(work: Work) -> bool:
    """Whether a request may have to wait for a verdict on a grammar."""
    output = work.output
    if work.params.structured_outputs is not None:
        return True
    return output is not None and (bool(output.tools) or output.thinking_budget is not None)


def may_be_quick(work: Work) -> bool:
    """Whether a request has few ids and little text, and asks for nothing that takes long."""
    params = work.params
    return (
        (work.head.task == GENERATE or work.head.task in OF_FOLDERS)
        and work.output is None
        and params.structured_outputs is None
        and not (params.bad_words or params.banned_strings or params.dry_multiplier)
        and _are_short(prompts_of(work))
    )


def _are_short(prompts: Sequence[Prompt]) -> bool:
    """Whether ids and texts together are few. Chats and pairs may stand in templates."""
    ids = characters = 0
    for prompt in prompts:
        match prompt:
            case Tokens():
                ids += len(prompt.ids)
            case PromptText():
                characters += len(prompt.text)
            case _:
                return False
    return ids <= QUICK_TOKENS * TOKEN_BYTES and characters <= QUICK_CHARACTERS


def _check_closable(family: Family, text_model: TextModel) -> None:
    """Raise ``PromptError`` where no token closes the model's thinking."""
    marks = family.reasoning
    if family.channels and not tells_messages(family, text_model.vocabulary):
        reason = "its vocabulary lacks tokens of the channels that it thinks in"
    elif marks is not None and text_model.token_id(marks.close) is None:
        reason = f"its vocabulary has no token {marks.close!r} that would close the thinking"
    else:
        return
    raise PromptError(
        f"thinking_token_budget: not possible with this model: {reason}; leave it out",
        "thinking_token_budget",
    )


def _grammar(
    work: Work, text_model: TextModel, prompt: bytes, strictness: Strictness
) -> Grammar | None:
    """What the answer must look like, with what may come before it. Raises ``PromptError``."""
    params, output = work.params, work.output
    grammar = params.structured_outputs
    allowed, bad_words = params.allowed_token_ids is not None, bool(params.bad_words)
    no_repeat = params.no_repeat_ngram_size > 0
    banned = bool(params.banned_strings)
    budget = None if output is None else output.thinking_budget
    family = text_model.form.family
    if output is not None:
        family = family_of(text_model, output)
        check_names(family, output)
        if budget is not None:
            _check_closable(family, text_model)
        asked = grammar is not None or output.mode == "required" or bool(output.strict)
        asked |= budget is not None and family.channels
        if asked or not (
            allowed or bad_words or no_repeat or banned
        ):  # which a form that nobody asked for gives way to
            vocabulary = text_model.vocabulary
            turn = Turn.HEADER
            if family.channels:
                turn = channel_turn(text_model, prompt, family)
            grammar = tool_grammar(family, vocabulary, output, strictness, grammar, turn)
    if budget is None and grammar is None:
        return None
    thought = thinking(text_model, prompt, family.reasoning)
    if budget is not None and thought.start_after:
        grammar = within_budget(budget, thought, grammar)
    elif grammar is not None and not grammar.may_end:
        padded = drops_first_blank(text_model.token_table) and not thought.start_after
        grammar = msgspec.structs.replace(grammar, padded=padded, **thought._asdict())
    if grammar is not None:
        reason = conflict(
            grammar,
            allowed_token_ids=allowed,
            bad_words=bad_words,
            no_repeat_ngram_size=no_repeat,
            banned_strings=banned,
        )
        if reason is not None:
            raise PromptError(reason, grammar.param)
    return grammar


def _check_grammar(work: Work, grammar: Grammar, grammars: GrammarCheck | None) -> None:
    """Vet a grammar unless an answer to it has begun already. Raises ``PromptError``, and
    ``GrammarsBusy`` where no verdict can be had."""
    if grammars is None:
        raise PromptError(f"{grammar.param}: not possible with this server", grammar.param)
    if not work.head.accepted and not any(choice.output for choice in work.choices):
        grammars.check(grammar)


def prepare(
    work: Work,
    text_model: TextModel,
    info: ModelInfo,
    max_model_len: int,
    seed: int,
    grammars: GrammarCheck | None = None,
    strictness: Strictness = "auto",
    folder_tasks: FolderTasks | None = None,
) -> Prepared:
    """Encode the prompt, or those of a batch, and resolve every parameter.

    Args:
        max_model_len: the engine's limit for prompt and output together, in tokens.
        seed: used where the client gave none.
        grammars: vets grammars; without it a request that has one is refused.
        strictness: what tool calls are held to that are no must.
        folder_tasks: what the model's folder makes of prompts, for requests of such a task.

    Raises ``PromptError`` for whatever the client can change, ``GrammarsBusy`` where no verdict on
    its grammar could be had.
    """
    if work.head.task in OF_FOLDERS and folder_tasks is not None:
        encoded = encode_inputs(work, text_model, info, max_model_len, folder_tasks)
    else:
        encoded = encode(work, text_model, info, max_model_len)
    prompt, length = encoded.ids, encoded.longest
    params = resolve(work.params, info.defaults, seed)
    limit = _output_limit(params, work, length, max_model_len)
    _check_prompt_details(work, params, length)
    stop_ids, bad_words = _stop_ids(params, info), _bad_words(params, text_model)
    _check_any_allowed(params, stop_ids, bad_words)
    if (grammar := _grammar(work, text_model, prompt, strictness)) is not None:
        _check_grammar(work, grammar, grammars)
        params = msgspec.structs.replace(params, structured_outputs=grammar)
    breakers = b""
    if params.dry_multiplier:
        breakers = breaker_tokens(text_model, params.dry_sequence_breakers)
    if params.banned_strings:
        stop_automaton(folded_strings(params))  # which is kept for the choices
    sampling = slot_sampling(params, stop_ids, bad_words, breakers)
    retain = [] if work.cache is None else retained_spans(work, work.cache, text_model, prompt)
    prepared = _token_work(work, encoded, params, sampling, stop_ids, limit, retain)
    skips = params.skip_special_tokens
    reading = reading_of(text_model, work.output, prompt, skips_special=skips)
    return Prepared(prepared, params, reading, work.pooling)


def _token_work(
    work: Work,
    encoded: EncodedPrompts,
    params: SamplingParams,
    sampling: SlotSampling,
    stop_ids: list[int],
    max_tokens: int,
    retain: list[RetainedSpan],
) -> TokenWork:
    """What the scheduler gets."""
    adjustments = sampling.adjustments
    return TokenWork(
        head=work.head,
        prompt=encoded.ids,
        sampling=sampling.packed(),
        choices=work.choices,
        stop_ids=stop_ids,
        max_tokens=max_tokens,
        prompt_logprobs=params.prompt_logprobs,
        reads_output=adjustments is not None or bool(params.banned_strings),
        reads_prompt=adjustments is not None and adjustments.reads_prompt,
        reads_logits=adjustments is not None and adjustments.steers,
        prefix=extended(b"", chain_root(work.head), encoded.shared),
        lengths=encoded.lengths,
        seconds=encoded.seconds,
        retain=retain,
        release=work.cache is not None and work.cache.release,
    )
