"""The grammar that a request's preparation gives its answer."""

from __future__ import annotations

from pathlib import Path

from penstock.protocol.grammar.request import Grammar
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import (
    Chat,
    ChoiceState,
    OutputFormat,
    RequestHead,
    Tokens,
    Work,
    kind_of,
)
from penstock.services.tokenizer.preparation import prepare
from penstock.services.tokenizer.text_model import TextModel

HELLO = Chat(b'[{"role": "user", "content": "Hi"}]')


class Recorded:
    """Takes every grammar."""

    def check(self, grammar: Grammar) -> None:
        pass


def grammar_of(
    model: TextModel,
    *,
    output: OutputFormat | None = None,
    form: Grammar | None = None,
    prompt: str = "",
) -> Grammar | None:
    """The grammar of the answer to a chat, or to the text of one."""
    given = Tokens(model.encode(prompt, add_special_tokens=False)) if prompt else HELLO
    work = Work(
        head=RequestHead(prompt_kind=kind_of(given)),
        prompt=given,
        params=SamplingParams(structured_outputs=form),
        choices=[ChoiceState(0)],
        output=output or OutputFormat(),
    )
    info = ModelInfo(Path("model"), "GptOss", model.vocab_size, 4096, "float32", [2], {}, {})
    done = prepare(work, model, info, 4096, 0, Recorded(), "function")  # type: ignore[arg-type]
    return done.params.structured_outputs
