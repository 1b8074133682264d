"""Tasks other than to generate: what is made of a prompt when all of it is computed.

A request of such a task brings no tokens. The worker pools the last hidden state of its prompt to
bytes, which everybody in between passes on unread, and the tokenizer makes an event of them. Other
packages bring tasks by an entry point; worker and tokenizer load them, so they must be installed
where either runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from penstock.protocol.config import ConfigError
from penstock.protocol.extensions import extensions

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.protocol.wire.messages.tokens import Event

GENERATE = "generate"
"""The task that brings tokens. Most engines do it (``Capacity.generates``)."""
TOKENIZE = "tokenize"
"""The task that brings the ids of its prompt. A tokenizer answers it, and no engine hears of it."""
DETOKENIZE = "detokenize"
"""The task that brings the text of its prompt, token ids; likewise."""
OF_TOKENIZERS = frozenset({TOKENIZE, DETOKENIZE})
EMBED = "embed"
"""The task that brings a ``Vector`` for its prompt: float32, cut and normalized as the request's
``PoolingParams`` and the model's folder say."""
SCORE = "score"
"""The task that brings ``Scores`` of one float32: how well the texts of a ``Pair`` fit together, or
how a single text is rated. The higher the better."""
CLASSIFY = "classify"
"""The task that brings ``Scores`` of a float32 for each of the engine's labels
(``Capacity.labels``), of one text or of a ``Pair``."""
OF_FOLDERS = frozenset({EMBED, SCORE, CLASSIFY})
"""Tasks that a model's folder decides on (``penstock.protocol.pooling``). The worker sends what it
computes as float32, before any normalization or activation: the tokenizer adds those."""
TASK_INPUT = "input"
"""The parameter that a tokenizer names where the prompt of such a task is wrong."""
ENTRY_POINT_GROUP = "penstock.tasks"
MEMBERS = ("name", "pool", "event")


class Task(Protocol):
    """One task. What its methods raise ends the request that they were called for, and no other."""

    name: str

    def pool(self, hidden: npt.NDArray[np.float32]) -> bytes:
        """The payload of a prompt. Called in the worker, beside its step.

        hidden: [hidden size], the last hidden state, behind the model's last norm, of the prompt's
        last token.
        """

    def event(self, values: bytes) -> Event:
        """What the client gets for a payload: a ``Vector`` or ``Scores``. Called in the
        tokenizer."""


def load_tasks() -> dict[str, Task]:
    """The tasks that installed packages bring, by name.

    Raises ``ConfigError`` for a package that does not deliver a task, or one whose name is taken.
    """
    found: dict[str, Task] = {}
    for extension in extensions(ENTRY_POINT_GROUP, "the task"):
        task: Any = extension.make(MEMBERS, f"{Task.__module__}.Task", "")
        if task.name in (GENERATE, *OF_TOKENIZERS, *OF_FOLDERS) or task.name in found:
            raise ConfigError(
                f"the task {task.name!r} of {extension} has the name of another one; uninstall one "
                "of them"
            )
        found[task.name] = task
    return found
