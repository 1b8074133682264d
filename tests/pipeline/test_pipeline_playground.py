"""The playground in a real browser, against a whole server."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.pipeline.browser import CHROMIUM, PlaygroundPage, shared_chromium, sync_api
from support.pipeline.served import Served, served
from support.polling import until

from penstock.protocol.sampling import PARAMETERS
from penstock.services.frontend.playground import UNSEEN

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

KEY = "key-of-this-test"
BLOCKS = 120
BLOCK_SIZE = 16
SERVER = (
    *("--device", "null", "--null-step-ms", "20"),
    *("--num-kv-blocks", str(BLOCKS), "--max-model-len", str(BLOCKS * BLOCK_SIZE)),
)
SELDOM_MS, HIDDEN_MS = 1500, 2500
"""In which the page asks once with its panel closed, and would ask again if it were not hidden."""
FREED_WITHIN_S = 5.0
"""A fraction of a second where the machine is free; the request's own end is 15 s away."""
NOT_SHOWN = {"n", "logit_bias", *UNSEEN}
Open = Callable[..., PlaygroundPage]
expect = sync_api.expect


@pytest.fixture(scope="module")
def browser() -> Any:
    return shared_chromium()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(*SERVER, "--api-key", KEY) as one:
        yield one


@pytest.fixture(scope="module")
def tab(browser: Any, server: Served) -> Iterator[PlaygroundPage]:
    one = PlaygroundPage(browser, server.url, key=KEY)
    yield one
    one.close()


@pytest.fixture
def show(browser: Any, server: Served, tab: PlaygroundPage) -> Iterator[Open]:
    """Opens the page with the key already known; in a tab of its own where it is told otherwise."""
    opened: list[PlaygroundPage] = []

    def show(key: str = KEY, phone: bool = False, own: bool = False) -> PlaygroundPage:
        if key == KEY and not phone and not own:
            tab.renew()
            return tab
        one = PlaygroundPage(browser, server.url, key=key, phone=phone)
        opened.append(one)
        if key == KEY:
            one.wait_for_controls()
        return one

    yield show
    tab.check_faults()
    for one in opened:
        one.close()


def get(url: str) -> dict[str, Any]:
    request = urllib.request.Request(url, headers={"x-api-key": KEY})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


class FirstToken(threading.Thread):
    """A second client, which notes when its first token comes."""

    def __init__(self, url: str, prompt_tokens: int) -> None:
        super().__init__(daemon=True)
        body = {"prompt": [5] * prompt_tokens, "max_tokens": 1, "stream": True, "ignore_eos": True}
        headers = {"x-api-key": KEY, "Content-Type": "application/json"}
        data = json.dumps(body).encode()
        self._request = urllib.request.Request(url + "/v1/completions", data, headers)
        self.at = 0.0
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: ") and not self.at:
                    self.at = time.monotonic()


def test_an_answer_streams_in_and_tells_its_tokens_and_times(show: Open) -> None:
    shown = show()
    shown.set(max_tokens=75, seed=1)
    shown.check("ignore_eos")
    shown.watch_text()
    shown.ask("Hello?")
    answer = shown.answer()
    assert len(shown.seen_lengths()) >= 4, "the text did not grow while it was written"
    stats = answer.locator(".stats").inner_text()
    assert re.fullmatch(
        r"75 tokens · first after [\d.]+ m?s · [\d.]+ tokens/s · cut at the token limit", stats
    )
    assert shown.page.locator("article.question p").inner_text() == "Hello?"
    assert answer.get_attribute("aria-busy") == "false"


def test_stop_frees_the_requests_blocks_long_before_its_end(show: Open, server: Served) -> None:
    """The second request needs blocks that only the first one's end can free, so its first token
    tells when that was; what the status says may be three quarters of a second old."""
    shown = show()
    shown.check("ignore_eos")
    shown.ask("0 " * 480)  # fills more than half of the blocks: two tokens each
    shown.answer("streaming")
    status_url = server.url + "/playground/status"
    until(lambda: get(status_url)["kv_blocks_used"] > BLOCKS // 2)
    second = FirstToken(server.url, prompt_tokens=BLOCKS // 2 * BLOCK_SIZE - 1)
    until(lambda: get(status_url)["waiting"] == 1)
    expect(shown.page.locator("#waiting")).to_have_text("1")
    assert second.at == 0.0
    began = time.monotonic()
    shown.page.click("#stop")
    second.join(60)
    assert 0 < second.at - began < FREED_WITHIN_S
    assert "stopped" in shown.answer().locator(".stats").inner_text()
    until(lambda: get(status_url)["kv_blocks_used"] == 0)
    expect(shown.page.locator("#running")).to_have_text("0")
    expect(shown.page.locator("#send")).to_be_visible()


def test_the_controls_come_from_the_servers_parameters_and_only_what_is_set_is_sent(
    show: Open,
) -> None:
    shown = show()
    page = shown.page
    shown.open_settings()
    names = page.eval_on_selector_all("#settings-form [name]", "all => all.map(one => one.name)")
    assert set(names) == {name for name in PARAMETERS if name not in NOT_SHOWN}
    usual = page.eval_on_selector_all("#controls [name]", "all => all.map(one => one.name)")
    assert usual == ["max_tokens", "temperature", "top_p", "seed"]
    on = [name for name, one in PARAMETERS.items() if one.default is True]
    assert [name for name in on if not page.is_checked(f"#sampling-{name}")] == []
    temperature = page.locator("#sampling-temperature")
    assert (temperature.get_attribute("min"), temperature.get_attribute("max")) == ("0", "100")
    for name in names:
        help_id = page.locator(f"#sampling-{name}").get_attribute("aria-describedby").split()[0]
        assert PARAMETERS[name].description in page.inner_text(f"#{help_id}")
    page.fill("#system", "Be brief.")
    page.fill("#sampling-stop", "END\nSTOP")
    shown.set(temperature=0.15, max_tokens=3, seed=7)
    shown.ask("Hello?")
    shown.answer()
    assert shown.asked == [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hello?"},
            ],
            "max_tokens": 3,
            "temperature": 0.15,
            "seed": 7,
            "stop": ["END", "STOP"],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ]


def test_a_value_out_of_range_is_not_sent_and_its_field_says_why(show: Open) -> None:
    shown = show()
    shown.set(temperature=101)
    shown.ask("Hello?")
    assert shown.page.evaluate("document.activeElement.id") == "sampling-temperature"
    assert "100" in shown.page.inner_text("#sampling-temperature-problem")
    assert shown.page.input_value("#question") == "Hello?"
    assert shown.asked == []


def test_copy_takes_the_text_and_regenerate_asks_the_same_again(show: Open) -> None:
    shown = show()
    shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown.set(max_tokens=5)
    shown.play("Two ", "words")
    shown.ask("Hello?")
    answer = shown.answer()
    answer.get_by_role("button", name="Copy").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert shown.page.evaluate("navigator.clipboard.readText()") == "Two words"
    shown.page.unroute("**/v1/chat/completions")
    answer.get_by_role("button", name="Regenerate").click()
    expect(shown.answer().locator(".stats")).to_contain_text("5 tokens")
    assert shown.page.locator("article.answer").count() == 1
    assert "Two words" not in shown.answer().inner_text()
    assert shown.asked[0] == shown.asked[1]


def test_the_key_is_asked_for_refused_when_wrong_and_kept_for_the_tab_only(show: Open) -> None:
    shown = show(key="")
    page = shown.page
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page.locator("#key-reason")).to_contain_text("does not accept this key")
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page.locator("#model-name")).to_have_text("penstock-demo")
    shown.wait_for_controls()
    expect(page.locator("#key-dialog")).to_be_hidden()
    page.reload()
    shown.wait_for_controls()
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    shown.open_settings()
    page.click("#forget-key")
    expect(page.locator("#banner")).to_contain_text("wants an API key")
    shown.ask("Hello?")
    page.click("#key-cancel")
    expect(shown.answer().locator(".notice")).to_contain_text("The question was not sent")


@pytest.mark.slow
def test_the_status_is_asked_for_often_while_it_is_seen_seldom_else_and_never_when_hidden(
    show: Open, server: Served
) -> None:
    shown = show(phone=True)
    page = shown.page
    expect(page.locator("#model-dot")).to_have_attribute("data-phase", "ready")
    before = shown.polls
    page.wait_for_timeout(SELDOM_MS)
    assert shown.polls <= before + 1, "it asks often though the panel is closed"
    until(lambda: bool(page.wait_for_timeout(50)) or shown.polls > before)
    before = shown.polls
    page.click("#engine-toggle")
    until(lambda: bool(page.wait_for_timeout(50)) or shown.polls >= before + 3)
    shown_pids = set(map(int, re.findall(r"pid (\d+)", page.inner_text("#processes"))))
    assert shown_pids == set(server.processes())
    services = page.locator("#processes strong").all_inner_texts()
    assert services[:5] == ["frontend", "tokenizer", "router", "scheduler", "worker"]
    page.evaluate(
        """() => {
          Object.defineProperty(document, 'hidden', { value: true, configurable: true });
          document.dispatchEvent(new Event('visibilitychange'));
        }"""
    )
    before = shown.polls
    page.wait_for_timeout(HIDDEN_MS)
    assert shown.polls <= before + 1, "it asks though the tab is hidden: one was on its way at most"


def test_the_page_tells_the_models_context_and_device(show: Open) -> None:
    page = show().page
    expect(page.locator("#model-facts")).to_have_text("1,920 tokens of context · null")
    facts = page.locator("#facts")
    expect(facts).to_contain_text("1,920 tokens")
    expect(facts).to_contain_text("penstock-demo")


def test_the_conversation_keeps_its_room_whatever_panels_are_opened(show: Open) -> None:
    """In every frame that is painted: a page that has a new width hears of it with the next frame,
    which a busy machine may paint much later."""
    page = show().page
    page.click("#settings-toggle")
    page.evaluate(
        """() => {
          window.painted = {};
          const look = () => {
            const { room = Infinity, width = 0 } = painted[innerWidth] ?? {};
            painted[innerWidth] = {
              room: Math.min(room, document.querySelector('main').clientWidth),
              width: Math.max(width, document.documentElement.scrollWidth),
            };
            requestAnimationFrame(look);
          };
          look();
        }"""
    )
    widths = (1900, 1300, 1100, 940, 830, 820, 500)
    for width in widths:
        page.set_viewport_size({"width": width, "height": 700})
        until(lambda width=width: page.evaluate(f"{width} in painted"))
    painted = page.evaluate("painted")
    assert [w for w in widths if painted[str(w)]["room"] < 360] == [], painted
    assert [w for w in widths if painted[str(w)]["width"] > w] == [], painted
    page.set_viewport_size({"width": 1900, "height": 700})
    for name in ("chats", "settings", "engine"):
        expect(page.locator(f"#{name}")).to_be_visible()


def test_it_works_by_keyboard_alone(show: Open) -> None:
    shown = show()
    page = shown.page
    shown.check("ignore_eos")
    page.focus("#question")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert shown.asked == []
    page.keyboard.press("Enter")
    shown.answer("streaming")
    page.keyboard.press("Escape")
    assert "stopped" in shown.answer().locator(".stats").inner_text()
    assert shown.asked[0]["messages"][-1]["content"] == "one\ntwo"
    assert page.evaluate("document.activeElement.id") == "question"
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea')].filter((one) =>
          !(one.labels?.length || one.getAttribute('aria-label') || one.textContent.trim())
        ).map((one) => one.outerHTML)"""
    )
    assert nameless == []


def test_it_fits_a_phone_with_text_of_at_least_16_px(show: Open) -> None:
    shown = show(phone=True)
    page = shown.page
    shown.play("A long line: " + "x" * 200 + "\n\n```\n" + "y" * 200 + "\n```")
    shown.ask("Hello " + "z" * 100)
    shown.answer()
    for panel in ("", "settings", "engine"):
        if panel:
            page.click(f"#{panel}-toggle")
            expect(page.locator(f"#{panel}")).to_be_visible()
            assert page.evaluate("document.querySelector('main').inert") is True
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.keyboard.press("Escape")
    expect(page.locator("#engine")).to_be_hidden()
    sizes = page.evaluate(
        """() => ['#question', '#system', '#send', '.answer .text p', '.question p'].map(
          (one) => parseFloat(getComputedStyle(document.querySelector(one)).fontSize))"""
    )
    assert min(sizes) >= 16


def test_a_slow_network_is_waited_for_and_silence_is_said(show: Open) -> None:
    shown = show(own=True)
    page = shown.page
    network = shown.context.new_cdp_session(page)
    network.send(
        "Network.emulateNetworkConditions",
        {"offline": False, "latency": 300, "downloadThroughput": 8000, "uploadThroughput": 8000},
    )
    shown.set(max_tokens=12, seed=3)
    shown.ask("Hello?")
    expect(shown.answer().locator(".stats")).to_contain_text("12 tokens")
    page.clock.install()
    page.route("**/v1/chat/completions", lambda route: None)  # nothing ever comes back
    shown.ask("Hello again?")
    shown.answer("waiting")
    page.clock.run_for(20_000)
    expect(page.locator(".notice >> nth=-1")).to_contain_text("Nothing from the server for")
    page.click("#stop")
    assert "stopped" in shown.answer().locator(".stats").inner_text()


@pytest.mark.slow
def test_a_restart_and_a_drain_are_said_and_the_text_that_had_arrived_is_kept(
    browser: Any,
) -> None:
    first = Served(*SERVER)
    try:
        shown = PlaygroundPage(browser, first.url)
        page = shown.page
        shown.wait_for_controls()
        shown.check("ignore_eos")
        shown.ask("Hello?")
        until(lambda: len(shown.answer("streaming").locator(".text").inner_text()) > 30)
    finally:
        first.kill()
    answer = shown.answer()
    notice = answer.locator(".notice")
    expect(notice).to_contain_text("connection to the server was lost")
    expect(notice).to_contain_text("What had arrived is kept above")
    assert len(answer.locator(".text").inner_text()) > 30
    expect(page.locator("#banner")).to_contain_text("The server does not answer")
    second = Served(*SERVER, "--port", first.url.rpartition(":")[2])
    try:
        expect(page.locator("#banner")).to_be_hidden()
        shown.set(max_tokens=9)
        notice.get_by_role("button", name="Try again").click()
        expect(shown.answer().locator(".stats")).to_contain_text("9 tokens")
        expect(shown.answer().locator(".notice")).to_be_hidden()
        shown.set(max_tokens=150)
        shown.ask("Go on.")
        shown.answer("streaming")
        second.process.send_signal(signal.SIGTERM)
        expect(page.locator("#banner")).to_contain_text("The server is going down")
        expect(shown.answer().locator(".stats")).to_contain_text("150 tokens")
        shown.close()
    finally:
        second.kill()
