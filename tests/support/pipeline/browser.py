"""A real Chromium for a test, driven by Playwright; the test is skipped where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'"
)
PROGRAMS = "chromium-headless-shell", "chromium", "chromium-browser"
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)
"""The first draws no windows, and takes half of the time of the others."""
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
DESKTOP = {"width": 1360, "height": 850}
PHONE = {"width": 390, "height": 780}
WAIT_MS = 40_000
sync_api.expect.set_options(timeout=WAIT_MS)
COMPLETIONS = "**/v1/chat/completions"


def call_delta(index: int, name: str, arguments: str, call_id: str = "") -> dict[str, Any]:
    """The first delta of a tool call."""
    function = {"name": name, "arguments": arguments}
    call = {"index": index, "id": call_id or f"call_{index}", "type": "function"}
    return {"tool_calls": [{**call, "function": function}]}


def server_sent(deltas: list[dict[str, Any]]) -> str:
    """A streamed chat completion of these deltas."""
    finish = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window. Skips the test where none is installed."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


_shared = ExitStack()
_browsers: list[Any] = []


def shared_chromium() -> Any:
    """A browser that stays for the tests that follow, as long as their fixture ``browser`` asks for
    it. (While it runs, no other event loop can.)"""
    if not _browsers:
        _browsers.append(_shared.enter_context(chromium()))
    return _browsers[0]


def close_shared_chromium() -> None:
    _browsers.clear()
    _shared.close()


class PlaygroundPage:
    """The playground in a tab of its own; what goes wrong in its scripts fails the test."""

    def __init__(self, browser: Any, url: str, *, key: str = "", phone: bool = False) -> None:
        self._size = PHONE if phone else DESKTOP
        # Without animations, which would have every frame painted while an answer comes.
        self.context = browser.new_context(
            viewport=self._size, is_mobile=phone, has_touch=phone, reduced_motion="reduce"
        )
        self.context.set_default_timeout(WAIT_MS)
        if key:
            self.context.add_init_script(f"sessionStorage.setItem('penstock-api-key', '{key}')")
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.polls = 0
        self.outside: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("request", self._on_request)
        self.url = url
        self.page.goto(url + "/")

    def _on_console(self, message: Any) -> None:
        if "Content Security Policy" in message.text or "TrustedHTML" in message.text:
            self.errors.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith(self.url + "/"):
            self.outside.append(request.url)
        if request.url.endswith("/playground/status"):
            self.polls += 1
        if request.url.endswith("/v1/chat/completions"):
            self.asked.append(request.post_data_json)

    def wait_for_controls(self) -> None:
        self.page.wait_for_selector("#sampling-temperature", state="attached")

    def open_settings(self) -> None:
        """The settings panel, with the rare parameters unfolded."""
        if not self.page.is_visible("#settings"):
            self.page.click("#settings-toggle")
        self.page.evaluate("document.querySelector('#settings details').open = true")

    def check(self, name: str) -> None:
        self.open_settings()
        self.page.check(f"#sampling-{name}")

    def set(self, **values: float) -> None:
        """Fill sampling controls in the settings panel."""
        self.open_settings()
        for name, value in values.items():
            self.page.fill(f"#sampling-{name}", str(value))

    def ask(self, question: str) -> None:
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")

    def answer(self, state: str = "ended") -> Any:
        """The last answer, once it is in that state."""
        self.page.wait_for_selector(f"#log > article.answer:last-child[data-state={state}]")
        return self.page.locator("article.answer").last

    def watch_text(self) -> None:
        """From now on the page notes every length that the text of its last answer has."""
        self.page.evaluate(
            """() => {
              const log = document.querySelector('#log');
              window.seenLengths = new Set();
              new MutationObserver(() => {
                const text = log.querySelector('article.answer:last-child .text');
                if (text) window.seenLengths.add(text.textContent.length);
              }).observe(log, {subtree: true, childList: true, characterData: true});
            }"""
        )

    def seen_lengths(self) -> list[int]:
        """What ``watch_text`` has noted."""
        found: list[int] = self.page.evaluate("[...window.seenLengths]")
        return found

    def play(self, *pieces: str) -> None:
        """Let the next questions be answered with these pieces in place of the server's."""
        self.play_answers([{"content": piece} for piece in pieces])

    def play_answers(self, *answers: list[dict[str, Any]] | None) -> None:
        """Answer the next requests with these deltas, one list each; the last one answers all that
        follow. ``None``: nothing ever comes."""
        left = list(answers)

        def answer(route: Any) -> None:
            deltas = left.pop(0) if len(left) > 1 else left[0]
            if deltas is not None:
                body = server_sent(deltas)
                route.fulfill(status=200, content_type="text/event-stream", body=body)

        self.page.route(COMPLETIONS, answer)

    def play_slowly(self) -> None:
        """Let the next answer come from ``push``, delta by delta."""
        self.page.evaluate(
            """() => {
              const other = window.fetch;
              window.fetch = async (path, init) => {
                if (!path.endsWith('chat/completions')) return other(path, init);
                const start = (into) => {
                  window.into = into;
                  init.signal.addEventListener('abort', () => into.error(init.signal.reason));
                };
                const answer = new ReadableStream({ start });
                return new Response(answer.pipeThrough(new TextEncoderStream()));
              };
            }"""
        )

    def push(self, **delta: Any) -> None:
        """The next delta of the answer; none: its end."""
        event = json.dumps({"choices": [{"delta": delta, "finish_reason": None}]})
        sent = f"data: {event if delta else '[DONE]'}\n\n"
        self.page.evaluate("(sent) => window.into.enqueue(sent)", sent)

    def renew(self) -> None:
        """Load the page as a new visitor does: nothing is stored, and nothing is played. It costs
        a fraction of a new tab."""
        for other in self.context.pages:
            if other is not self.page:
                other.close()
        self.page.unroute_all()
        self.page.set_viewport_size(self._size)
        self.page.goto(self.url + "/live")  # the page stores nothing more when it is left
        self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        self.asked.clear()
        self.page.goto(self.url + "/")
        self.wait_for_controls()

    def check_faults(self) -> None:
        """Nothing went wrong in its scripts, and nobody else was asked."""
        assert not self.errors, self.errors
        assert self.outside == []

    def close(self) -> None:
        self.context.close()
        self.check_faults()
