"""The flags of ``penstock chat``, and what they start."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.protocol.config.terminal import Style, is_terminal, style_of
from penstock.services.commands.failure import WRONG_USE, CommandError
from penstock.services.commands.parser import (
    URL_HELP,
    CommandParser,
    add_key_flag,
    add_sampling_flags,
    client,
    given,
    served_model,
)
from penstock.services.commands.printable import one_line

if TYPE_CHECKING:
    from penstock.services.commands.api_client import ApiClient
    from penstock.services.commands.chat.views import View

DESCRIPTION = (
    "Talk to a model: /help lists the commands of the conversation. Without a terminal, standard "
    "input is one message and the answer is plain text."
)


def parser() -> CommandParser:
    parser = CommandParser("chat", "[URL | MODEL] [flags] [-- flags of serve]", DESCRIPTION)
    parser.add_argument(
        "SERVER",
        nargs="?",
        metavar="URL | MODEL",
        help=f"{URL_HELP}; or a model's folder or ORG/NAME on the hub, which is served meanwhile",
    )
    add_key_flag(parser)
    parser.add_argument("--model", metavar="NAME", help="one of the server's models")
    parser.add_argument("-m", "--message", metavar="TEXT", help="ask this alone, then end")
    parser.add_argument("--system", metavar="TEXT", help="the system message", default="")
    parser.add_argument("--load", metavar="FILE", help="go on from what /save wrote")
    parser.add_argument(
        "--lines", action="store_true",
        help="without a terminal: each line of standard input as if it were typed",
    )  # fmt: skip
    parser.add_argument("--hide-thinking", action="store_true", help="show only the answers")
    parser.add_argument("--no-history", action="store_true", help="remember no typed lines")
    add_sampling_flags(parser)
    return parser


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ``CommandError``."""
    from penstock.services.commands.chat.conversation import Conversation
    from penstock.services.commands.settings import sampling

    place = arguments.index("--") if "--" in arguments else len(arguments)
    parsed = parser().parse_args(arguments[:place])
    settings = sampling(given(parsed), parsed.set)
    with _server(parsed, arguments[place + 1 :], environment) as server:
        conversation = Conversation("", parsed.system, settings)
        if parsed.load:
            conversation.load(parsed.load)
            conversation.system = parsed.system or conversation.system
        conversation.model = served_model(server, parsed.model)
        return _talk(parsed, conversation, server, environment)


@contextlib.contextmanager
def _server(
    parsed: Any, flags: Sequence[str], environment: Mapping[str, str]
) -> Iterator[ApiClient]:
    """The server to talk to, which may be one of our own."""
    from penstock.protocol.model_hub import is_hub_name

    named = parsed.SERVER
    if named and (os.path.isdir(named) or is_hub_name(named)):
        from penstock.services.commands.chat.own_server import own_server

        with own_server(named, flags, environment, style_of(2, environment)) as url:
            yield client(url, parsed.api_key, environment)
        return
    if flags:
        raise CommandError(f"{flags[0]} is for a server that is started for a MODEL", WRONG_USE)
    yield client(named, parsed.api_key, environment)


def _talk(parsed: Any, conversation: Any, server: ApiClient, environment: Mapping[str, str]) -> int:
    from penstock.services.commands.chat.line_input import PipedInput, history_file, line_input
    from penstock.services.commands.chat.loop import Chat

    people = sys.stdin.isatty() and sys.stdout.isatty() and parsed.message is None
    style = style_of(1, environment)
    chat = Chat(
        conversation, server, _view(style, thinking=not parsed.hide_thinking), _tell, _complain
    )
    if people:
        _greet(conversation.model, server.endpoint.url, style)
        history = None if parsed.no_history else history_file(environment)
        lines = line_input(history, chat.commands.words, cursor=style.cursor)
        chat.run(lines)  # what went wrong was told, and the user went on
        return 0
    if parsed.lines:
        return chat.run(PipedInput(sys.stdin))
    chat.take(_message(parsed.message))
    return 0


def _view(style: Style, *, thinking: bool) -> View:
    from penstock.services.commands.chat.views import MarkdownView, PlainView

    if style.cursor:
        with contextlib.suppress(ImportError):
            return MarkdownView(style, thinking=thinking)
    terminal = is_terminal(1)
    return PlainView(style, thinking=thinking and terminal, neutral=terminal)


def _message(given: str | None) -> str:
    """What is asked without a conversation: the flag's text, and behind it standard input."""
    try:
        piped = "" if sys.stdin.isatty() else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input is no text in {error.encoding}", WRONG_USE) from None
    text = "\n\n".join(part for part in (given, piped.strip("\n")) if part)
    if not text:
        raise CommandError("there is nothing to ask: give --message or standard input", WRONG_USE)
    return "/" + text if text.startswith("/") else text


def _greet(model: str, url: str, style: Style) -> None:
    print(f"{style.bold(one_line(model))} {style.dim('at ' + url)}")
    print(style.dim("/help lists commands; Ctrl-C interrupts an answer; Ctrl-D leaves") + "\n")


def _tell(text: str) -> None:
    print(text + "\n" if sys.stdout.isatty() else text, flush=True)


def _complain(text: str) -> None:
    print(f"penstock: {text}", file=sys.stderr, flush=True)
