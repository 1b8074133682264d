"""The text side of a checkpoint: tokenizer, control tokens and chat template."""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Encoding, Tokenizer

from penstock.protocol.model_info import BadModelFolder
from penstock.protocol.wire.messages.requests import Chat, Pair, Prompt, PromptText, Tokens
from penstock.services.tokenizer import final_message
from penstock.services.tokenizer.chat_template import (
    ChatTemplate,
    read_chat_template,
    read_messages,
    read_tokenizer_config,
    read_variables,
)
from penstock.services.tokenizer.control_tokens import ControlTokens, Rendered
from penstock.services.tokenizer.final_message import OpenMessage
from penstock.services.tokenizer.output.detection import AUTO, Clues, choose
from penstock.services.tokenizer.output.machine import Vocabulary
from penstock.services.tokenizer.plain_encoder import PlainEncoder, encode, special_tokens
from penstock.services.tokenizer.prompt_error import PromptError, window_exceeded
from penstock.services.tokenizer.template_system import (
    has_late_system,
    takes_late_system,
    with_early_system,
)
from penstock.services.tokenizer.template_tools import ToolStyle, find_style, has_calls, shaped
from penstock.services.tokenizer.token_table import TokenTable, build_token_table
from penstock.services.tokenizer.tokenizer_files import read_tokenizer


def _to_bytes(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int, path: Path) -> None:
    """A tokenizer of another model would serve nonsense. Raises ``BadModelFolder``.

    Tokens that were added past the model's vocabulary (a padding token, in many fine-tuned
    checkpoints) are no fault: a request that uses one is refused.
    """
    highest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
    if highest >= vocab_size:
        raise BadModelFolder(
            f"{path}: token ids reach {highest}, but the model has {vocab_size} (vocab_size in "
            "config.json): the tokenizer is another model's"
        )


_CUT_TOKENS = 16
"""The last tokens before a place where a text was cut may be others than those of the whole."""
LONG_TOKEN = 8
"""Characters a token; texts that are longer for the limit are looked at from their beginning."""


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """What two texts keep of their tokens, so many at most: the longer one is cut first."""
    shorter = min(first, second, room // 2)
    longer = min(max(first, second), room - shorter)
    if first >= second:
        return longer, min(second, room - longer)
    return min(first, room - longer), longer


def _too_long(found: str, most: int, param: str, cuts: bool) -> str:
    """found: how long a beginning is. Of an input no answer follows."""
    if param != "input":
        return (
            f"the prompt is too long: {found}; the maximum context length is {most} tokens for "
            "prompt and answer together (--max-model-len)"
        )
    if cuts:
        return f"the input is too long to be truncated: {found}, and {most} are read: shorten it"
    return (
        f"the input is too long: {found}; this model takes at most {most}: shorten it, or send "
        "truncate_prompt_tokens"
    )


class TextModel:
    """Encodes prompts for one model. Every method is safe to call from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        name: str = "this model",
        cleans_up: bool = False,
        parsers: tuple[str, str] = (AUTO, AUTO),
        response_template: object = None,
    ) -> None:
        """parsers: names of what reads tool calls and thinking. response_template: what the
        checkpoint says of that. Raises ``UnknownParser``."""
        # What a checkpoint says about padding and truncation is meant for training.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer
        self._cleans_up = cleans_up
        self.token_table = build_token_table(tokenizer, cleans_up=cleans_up)
        self._full_table: TokenTable | None = None
        self._template = template
        self._name = name
        self._control = ControlTokens(token.content for token in special_tokens(tokenizer).values())
        self._plain: PlainEncoder | None = None
        self._plain_lock = threading.Lock()
        self.special_ids = frozenset(special_tokens(tokenizer))
        """Ids of control tokens."""
        added = tokenizer.get_added_tokens_decoder()
        self.vocabulary = Vocabulary(
            {token.content: number for number, token in added.items()}, self.special_ids
        )
        """Marks that outputs are read by."""
        source = None if template is None else template.source
        self.form = choose(Clues(source, self.vocabulary.added, response_template), *parsers)
        """How its outputs are read."""
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """Highest token id of the tokenizer plus one; the model may have room for more."""

    @classmethod
    def load(
        cls, folder: Path, vocab_size: int | None = None, parsers: tuple[str, str] = (AUTO, AUTO)
    ) -> TextModel:
        """Read the tokenizer files of a checkpoint; ``vocab_size`` is the model's. Raises
        ``BadModelFolder``, and ``UnknownParser`` for names that no parser has."""
        config = read_tokenizer_config(folder)
        read = read_tokenizer(folder, config)
        if vocab_size is not None:
            _check_vocabulary(read.tokenizer, vocab_size, folder / "tokenizer.json")
        template = read_chat_template(folder, config, read.special_tokens)
        name = folder.resolve().name
        return cls(
            read.tokenizer,
            template,
            name=name,
            cleans_up=read.cleans_up,
            parsers=parsers,
            response_template=config.get("response_template"),
        )

    def table(self, skip_special: bool) -> TokenTable:
        """What each token stands for. The table with special tokens is made at first need."""
        if skip_special:
            return self.token_table
        if self._full_table is None:
            self._full_table = build_token_table(
                self.tokenizer, skip_special=False, cleans_up=self._cleans_up
            )
        return self._full_table

    def token_id(self, text: str) -> int | None:
        """The token that is written so, if one is."""
        number: int | None = self.tokenizer.token_to_id(text)
        return number

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """int32 ids, little endian. Control tokens written in the text become control tokens."""
        return _to_bytes(encode(self.tokenizer, text, add_special_tokens))

    def render_chat(self, messages: bytes, template_kwargs: bytes, tools: bytes = b"") -> str:
        """The prompt's text. Raises ``PromptError``."""
        return self.rendered(messages, template_kwargs, tools).text

    def encode_chat(
        self,
        messages: bytes,
        template_kwargs: bytes,
        max_tokens: int | None = None,
        tools: bytes = b"",
    ) -> bytes:
        """int32 ids of a rendered chat. Raises ``PromptError``.

        tools: JSON array of those that are offered; empty: none.

        The template writes the control tokens, so none is added; those that a user wrote are
        encoded as plain text.
        """
        rendered = self.rendered(messages, template_kwargs, tools)
        self._check_length(rendered.text, max_tokens, "messages")
        return self.encode_rendered(rendered)

    def encode_rendered(self, rendered: Rendered) -> bytes:
        """int32 ids of what a template wrote, or of its beginning."""
        if rendered.own is None or self.tokenizer.encode_special_tokens:
            return self.encode(rendered.text, add_special_tokens=False)
        return _to_bytes(self._plain_encoder().encode(rendered.text, rendered.own))

    def encode_prompt(
        self, prompt: Prompt, max_tokens: int | None = None, tools: bytes = b""
    ) -> bytes:
        """int32 ids of whatever the client sent. Raises ``PromptError``, soon where a text has far
        more than ``max_tokens``. tools: JSON array of those offered in a chat; empty: none."""
        match prompt:
            case Chat(messages, template_kwargs):
                return self.encode_chat(messages, template_kwargs, max_tokens, tools)
            case PromptText(text, add_special_tokens):
                self._check_length(text, max_tokens, "prompt")
                return self.encode(text, add_special_tokens)
            case Tokens(ids):
                return ids
            case Pair():
                raise PromptError("a pair of texts is no prompt to be continued", "prompt")

    def encode_cut(
        self, text: str, keep: int | None, most: int, add_special_tokens: bool = True
    ) -> bytes:
        """int32 ids of a text, of which at most ``keep`` are kept: its beginning, and all special
        tokens around it. Of a long text that is cut no more is encoded than what surely holds them;
        else raises ``PromptError``, soon where it has far more than ``most``."""
        if keep is None:
            self._check_length(text, most, "input")
            return self.encode(text, add_special_tokens)
        bare = self._beginning(text, keep)
        if not add_special_tokens:
            return _to_bytes(bare.ids[:keep])
        bare.truncate(max(0, keep - self.tokenizer.num_special_tokens_to_add(False)))
        return _to_bytes(self.tokenizer.post_process(bare).ids[:keep])

    def encode_plain(self, text: str, most: int, *, cuts: bool = False) -> bytes:
        """int32 ids of a text in which no control token counts as one. Raises ``PromptError``, soon
        where a text has far more than ``most``. cuts: the ids are to be truncated."""
        self._check_length(text, most, "input", cuts=cuts)
        if self.tokenizer.encode_special_tokens:
            return self.encode(text, add_special_tokens=False)
        return _to_bytes(self._plain_encoder().encode(text, []))

    def encode_pair(
        self,
        text: str,
        other: str,
        keep: int | None,
        most: int,
        keep_other: int | None = None,
        most_other: int | None = None,
    ) -> tuple[bytes, int]:
        """int32 ids of two texts as the tokenizer puts them together, and where the second segment
        begins, or 0 where there is one. keep: so many tokens at most; the longer text is cut.
        keep_other: tokens of the second text, at most, before that. Of a text that is cut and has
        far more than ``most`` (the second one: ``most_other``), the beginning alone is looked at;
        else raises ``PromptError`` for it, soon."""
        most_other = most_other or most
        if keep is None and keep_other is None:
            self._check_length(text, most, "input")
            self._check_length(other, most_other, "input")
            (both,) = self.tokenizer.encode_batch_fast([(text, other)])
        else:
            first = self._part(text, keep, most)
            second = self._part(other, keep if keep_other is None else keep_other, most_other)
            if keep_other is not None:
                second.truncate(keep_other)
            if keep is not None:
                room = max(0, keep - self.tokenizer.num_special_tokens_to_add(True))
                lengths = _shares(len(first.ids), len(second.ids), room)
                first.truncate(lengths[0])
                second.truncate(lengths[1])
            both = self.tokenizer.post_process(first, second)
        types: list[int] = both.type_ids
        return _to_bytes(both.ids), types.index(1) if 1 in types else 0

    def _part(self, text: str, wanted: int | None, most: int) -> Encoding:
        """A text of a pair without special tokens, or of one with far more than ``most`` tokens
        what holds the first ``wanted``. Raises ``PromptError`` where all are wanted (``None``)."""
        if wanted is not None and len(text) > LONG_TOKEN * most:
            return self._beginning(text, wanted)
        self._check_length(text, most, "input")
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return found

    def beginning(self, text: str, tokens: int) -> str:
        """The part of a text that its first ``tokens`` tokens stand for. Of a long one no more is
        encoded than what surely holds them."""
        found = self._beginning(text, tokens, offsets=True)
        return text if len(found.ids) <= tokens else text[: found.offsets[tokens - 1][1]]

    def _beginning(self, text: str, tokens: int, *, offsets: bool = False) -> Encoding:
        """Of so much of a text that its first ``tokens`` tokens are those of the whole, without
        special ones; of all of it, if there are no more. offsets: wanted, which takes longer."""
        encode_batch = self.tokenizer.encode_batch if offsets else self.tokenizer.encode_batch_fast
        size = LONG_TOKEN * (tokens + _CUT_TOKENS)
        while True:
            (found,) = encode_batch([text[:size]], add_special_tokens=False)
            if size >= len(text) or len(found.ids) > tokens + _CUT_TOKENS:
                return found
            size *= 2

    def _check_length(
        self, text: str, max_tokens: int | None, param: str, *, cuts: bool = False
    ) -> None:
        """Raise ``PromptError`` for a text whose beginning alone is much too long. cuts: it is to
        be truncated.

        Megabytes of text would keep a thread for seconds and take gigabytes, only to be refused.
        Where a text is cut, a token or two more may come about, never twice as many.
        """
        if max_tokens is None:
            return
        size = LONG_TOKEN * max_tokens
        while size < len(text):
            count = len(encode(self.tokenizer, text[:size], add_special_tokens=False))
            if count > 2 * max_tokens:
                found = f"the first {size} of {len(text)} characters are {count} tokens"
                raise window_exceeded(_too_long(found, max_tokens, param, cuts), param)
            size *= 2

    @cached_property
    def tool_style(self) -> ToolStyle:
        """How the chat template takes tools. Found out at first need, in some milliseconds."""
        return ToolStyle() if self._template is None else find_style(self._try)

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether the chat template knows messages of the system behind others."""
        return self._template is None or takes_late_system(self._try)

    def _try(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        if self._template is None:
            raise TypeError(f"{self._name} has no chat template")
        return self._template.render(messages, {"tools": tools})

    def rendered(self, messages: bytes, template_kwargs: bytes, tools: bytes) -> Rendered:
        """The prompt's text, and what of it the template wrote. Raises ``PromptError``."""
        if self._template is None:
            raise PromptError(
                f"{self._name} has no chat template; send a prompt to /v1/completions instead",
                "messages",
            )
        variables = read_variables(template_kwargs)
        chat, offered = read_messages(messages), msgspec.json.decode(tools) if tools else None
        if has_late_system(chat) and not self.takes_late_system:
            chat = with_early_system(chat)
        if offered or has_calls(chat):
            chat, offered = shaped(chat, offered, self.tool_style)
        variables["tools"] = offered
        if not variables.pop(final_message.VARIABLE, False):
            return self._control.read(*self._template.render_traced(chat, variables))
        opened = OpenMessage(chat)
        text, own = self._template.render_traced(opened.messages, variables)
        end = opened.end(text)
        opened.check(text[:end])
        return self._control.read(text[:end], own[:end])

    def _plain_encoder(self) -> PlainEncoder:
        """Made at first need: it doubles the tokenizer's memory, and few requests want it."""
        with self._plain_lock:
            if self._plain is None:
                self._plain = PlainEncoder(self.tokenizer)
            return self._plain
