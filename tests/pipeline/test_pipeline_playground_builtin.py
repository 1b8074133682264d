"""The page and the built-in model together: what a visitor of a bare `make serve` sees."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.pipeline.browser import CHROMIUM, PlaygroundPage, chromium, sync_api
from support.pipeline.served import Served, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

expect = sync_api.expect
STATS = re.compile(r"(\d+) tokens? · first after [\d.]+ m?s · [\d.]+ tokens/s")
EXAMPLES = {
    "What is Penstock?": "Penstock serves large language models.",
    "What is 17 + 25?": "42",
    "Reverse the word penstock.": "kcotsnep",
    "Which weekday is 4 July 2026?": "Saturday",
    "Tell me a story about a fox named Mila.": "Mila",
}
WITH_A_TOOL = "What time is it in Tokyo?"
"""Another example, asked in ``test_pipeline_playground_tools``."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one


@pytest.fixture(scope="module", params=["desktop", "phone"])
def shown(request: Any, server: Served) -> Iterator[PlaygroundPage]:
    with chromium() as browser:
        one = PlaygroundPage(browser, server.url, phone=request.param == "phone")
        one.wait_for_controls()
        yield one
        one.close()


def test_a_question_typed_into_the_page_is_answered_by_the_built_in_model(
    shown: PlaygroundPage,
) -> None:
    page = shown.page
    expect(page.locator("#model-name")).to_have_text("penstock-demo")
    expect(page.locator("#model-dot")).to_have_attribute("data-phase", "ready")
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement.id") != "question":
        page.keyboard.press("Tab")
    page.keyboard.type("What is 365 + 476?")
    page.keyboard.press("Enter")
    answer = shown.answer()
    assert answer.locator(".md > p").all_inner_texts() == ["841"]
    found = STATS.fullmatch(answer.locator(".stats").inner_text())
    assert found is not None
    assert int(found[1]) > 30, "its thinking counts too"
    thought = answer.locator("details.think")
    assert not thought.locator("div").is_visible()
    thought.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(thought.locator("div")).to_contain_text("5+6+0=11: 1 carry 1")


def test_every_example_on_the_page_is_answered_right(shown: PlaygroundPage) -> None:
    page = shown.page
    page.click("#new-chat")
    offered = page.locator("#examples button").all_inner_texts()
    assert [question for question in offered if question != WITH_A_TOOL] == list(EXAMPLES)
    for question, expected in EXAMPLES.items():
        page.click("#new-chat")
        page.get_by_role("button", name=question).press("Enter")
        answer = shown.answer()
        expect(page.locator("#send")).to_be_visible()
        assert expected in answer.locator(".md > p").last.inner_text()
        assert STATS.fullmatch(answer.locator(".stats").inner_text())
