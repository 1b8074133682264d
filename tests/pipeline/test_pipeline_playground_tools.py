"""Tools and thinking on the playground's page: shown as they come, run there, sent back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.pipeline.browser import CHROMIUM, PlaygroundPage, call_delta, shared_chromium, sync_api
from support.pipeline.served import BUILT_IN, SharedServers

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

expect = sync_api.expect
EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=2</script>'
MORE_ARGUMENTS = {"tool_calls": [{"index": 0, "function": {"arguments": '"12*7"}'}}]}


@pytest.fixture(scope="module")
def url(shared_server: SharedServers) -> str:
    return shared_server(*BUILT_IN).url


@pytest.fixture(scope="module")
def browser() -> Any:
    return shared_chromium()


@pytest.fixture(scope="module")
def tab(browser: Any, url: str) -> Iterator[PlaygroundPage]:
    one = PlaygroundPage(browser, url)
    yield one
    one.close()


@pytest.fixture
def shown(tab: PlaygroundPage) -> Iterator[PlaygroundPage]:
    tab.renew()
    yield tab
    tab.check_faults()


def offer(shown: PlaygroundPage, *names: str) -> None:
    shown.open_settings()
    for name in names:
        shown.page.check(f"#tool-{name}")


def card(shown: PlaygroundPage, place: int = 0) -> tuple[str, str, str, str]:
    """A tool call as it is shown: state, name, arguments, result."""
    one = shown.page.locator(".call").nth(place)
    arguments, result = one.locator("pre").all_inner_texts()
    name = one.locator("code").inner_text()
    return one.get_attribute("data-state") or "", name, arguments, result


def call_message(name: str, arguments: str, result: str, **said: str) -> list[dict[str, Any]]:
    """A call and its result as the next request holds them."""
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", **said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "name": name, "content": result},
    ]


def test_a_called_tool_runs_in_the_page_and_its_result_goes_to_the_model(
    shown: PlaygroundPage,
) -> None:
    page = shown.page
    offer(shown, "calculate")
    shown.play_answers(
        [{"reasoning": "I must\n"}, {"reasoning": "calculate."},
         call_delta(0, "calculate", '{"expression": '), MORE_ARGUMENTS],
        [{"content": "It is **84**."}],
    )  # fmt: skip
    shown.ask("What is 12 * 7?")
    answer = shown.answer()
    assert [tool["function"]["name"] for tool in shown.asked[0]["tools"]] == ["calculate"]
    question = {"role": "user", "content": "What is 12 * 7?"}
    called = ("calculate", '{"expression": "12*7"}', '{"result": 84}')
    thought = "I must\ncalculate."
    assert shown.asked[1]["messages"] == [question, *call_message(*called, reasoning=thought)]
    assert shown.asked[1]["tools"] == shown.asked[0]["tools"]
    assert card(shown) == ("done", *called)
    assert answer.locator(".md").last.inner_text() == "It is 84."
    page.reload()
    shown.wait_for_controls()
    assert card(shown) == ("done", *called)
    expect(page.locator("#tool-calculate")).to_be_checked()
    expect(page.locator("#tool-get_time")).not_to_be_checked()
    shown.ask("And now?")
    shown.answer()
    history = [question, *call_message(*called), {"role": "assistant", "content": "It is **84**."}]
    assert shown.asked[2]["messages"] == [*history, {"role": "user", "content": "And now?"}]
    page.locator(".answer").first.get_by_role("button", name="Regenerate").click()
    shown.answer()
    assert shown.asked[3]["messages"] == [question]
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".call")).to_have_count(1)


def test_without_a_checked_tool_none_is_offered_and_clear_all_unchecks_them(
    shown: PlaygroundPage,
) -> None:
    shown.play("Yes.")
    offer(shown, "calculate", "get_time", "roll_dice")
    shown.page.click("#reset")
    expect(shown.page.locator("#tool-choices input:checked")).to_have_count(0)
    shown.ask("Hello?")
    shown.answer()
    assert "tools" not in shown.asked[0]


ERRORS = {
    ("launch", "{}"): "There is no tool 'launch'; there are: calculate.",
    ("get_time", '{"city": "Rome"}'): "There is no tool 'get_time'; there are: calculate.",
    ("constructor", "{}"): "There is no tool 'constructor'; there are: calculate.",
    ("calculate", '{"expression": "1'): "The arguments are not valid JSON.",
    ("calculate", "[1]"): "The arguments must be a JSON object.",
    ("calculate", '{"expression": 5}'): "The argument 'expression' must be of type string.",
    ("calculate", ""): "The argument 'expression' is missing.",
    (
        "calculate",
        '{"expression": "1", "x": 2}',
    ): "There is no argument 'x'; there are: expression.",
    ("calculate", '{"expression": "1/0"}'): "It divides by zero.",
    (EVIL, EVIL): f"There is no tool '{EVIL}'; there are: calculate.",
}


def test_a_call_that_cannot_be_run_gives_the_model_an_error_and_shows_it(
    shown: PlaygroundPage,
) -> None:
    offer(shown, "calculate")
    for place, ((name, arguments), error) in enumerate(ERRORS.items()):
        shown.play_answers([call_delta(0, name, arguments)], [{"content": "Sorry."}])
        shown.ask("Go on.")
        shown.answer()
        result = json.dumps({"error": error})
        assert card(shown, place) == ("failed", name, arguments, result)
        said, told = shown.asked[-1]["messages"][-2:]
        assert told["content"] == result
        sent = said["tool_calls"][0]["function"]["arguments"]
        assert isinstance(json.loads(sent or "{}"), dict)  # as chat templates want it
    assert shown.page.locator(".answer").locator("img, script").count() == 0
    assert shown.page.evaluate("window.hit") is None


def test_several_calls_of_one_answer_are_all_run(shown: PlaygroundPage) -> None:
    offer(shown, "roll_dice", "get_time")
    shown.play_answers(
        [{"content": "I look."}, call_delta(0, "roll_dice", '{"count": 40, "sides": 3}'),
         call_delta(1, "get_time", '{"city": "Tokyo"}')],
        [{"content": "Done."}],
    )  # fmt: skip
    shown.ask("Roll and look.")
    shown.answer()
    rolled = json.loads(card(shown, 0)[3])["result"]
    assert len(rolled) == 40
    assert set(rolled) <= {1, 2, 3}
    now = json.loads(card(shown, 1)[3])
    assert re.fullmatch(r"[012]\d[0-5]\d", now["result"])
    assert re.fullmatch(r"\w+day", now["day"])
    messages = shown.asked[1]["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "I look."
    assert [one["tool_call_id"] for one in messages[2:]] == ["call_0", "call_1"]


def test_a_model_that_calls_without_end_is_stopped_after_eight_rounds(
    shown: PlaygroundPage,
) -> None:
    offer(shown, "calculate")
    shown.play_answers([call_delta(0, "calculate", '{"expression": "1"}')])
    shown.ask("Go on for ever.")
    notice = shown.answer().locator(".notice")
    expect(notice).to_contain_text("has called tools 8 times without an answer")
    assert len(shown.asked) == 9
    assert card(shown, 8)[0] == "dropped"
    shown.play("Yes.")
    notice.get_by_role("button", name="Try again").click()
    expect(shown.answer().locator(".md")).to_have_text("Yes.")
    assert [one["role"] for one in shown.asked[-1]["messages"]] == ["user"]


def test_stop_ends_an_answer_between_its_rounds_and_what_was_called_stays(
    shown: PlaygroundPage,
) -> None:
    offer(shown, "calculate")
    shown.play_answers([call_delta(0, "calculate", '{"expression": "1"}')], None)
    shown.ask("Calculate.")
    expect(shown.page.locator(".call[data-state=done]")).to_have_count(1)
    shown.page.click("#stop")
    assert "stopped" in shown.answer().locator(".stats").inner_text()
    assert len(shown.asked) == 2
    shown.play("Yes.")
    shown.ask("And now?")
    expect(shown.answer().locator(".md")).to_have_text("Yes.")
    assert [one["content"] for one in shown.asked[-1]["messages"]] == ["And now?"]
    shown.page.reload()
    expect(shown.page.locator(".call[data-state=done]")).to_have_count(1)


def test_thinking_is_shown_as_it_comes_and_folds_itself_when_the_answer_begins(
    shown: PlaygroundPage,
) -> None:
    shown.play_slowly()
    shown.ask("Think.")
    shown.push(role="assistant")
    shown.push(reasoning="One ")
    thought = shown.page.locator("details.think > div")
    expect(thought).to_have_text("One")
    expect(thought).to_be_visible()
    shown.push(reasoning="two\n" * 200)
    expect(thought).to_contain_text("two\ntwo")
    assert thought.evaluate("one => one.scrollTop > 0 && one.clientHeight < 300")
    shown.push(content="The ")
    expect(thought).to_be_hidden()
    expect(shown.page.locator("details.think > summary")).to_have_text("Thought, 201 words")
    shown.page.click("details.think > summary")
    shown.push(content="end.")
    shown.push()
    expect(shown.answer().locator(".md")).to_have_text("The end.")
    expect(thought).to_be_visible()  # the reader wanted to see it


def test_the_arguments_of_a_call_are_shown_as_they_come(shown: PlaygroundPage) -> None:
    shown.play_slowly()
    shown.ask("Call.")
    shown.push(**call_delta(0, "calculate", ""))
    one = shown.page.locator(".call")
    expect(one.locator("code")).to_have_text("calculate")
    for given in ('{"expression": ', '{"expression": "12*7"}'):
        part = given.removeprefix('{"expression": ') or given
        shown.push(tool_calls=[{"index": 0, "function": {"arguments": part}}])
        expect(one.locator("pre").first).to_have_text(given)
    expect(one).to_have_attribute("data-state", "written")
    shown.page.click("#stop")
    expect(one).to_have_attribute("data-state", "dropped")


def test_stored_calls_that_cannot_be_read_do_no_harm(shown: PlaygroundPage) -> None:
    page = shown.page
    page.evaluate(
        """() => {
          const put = (id, turn) => {
            const turns = [{ question: id, ended: true, ...turn }];
            const key = `penstock:${location.pathname}:chat:${id}`;
            localStorage.setItem(key, JSON.stringify({ version: 1, updated: 1, turns }));
          };
          const calls = [null, { name: {}, result: 5 }];
          put('old', { text: '<think>x</think>Before' });
          put('odd', { steps: [null, 7, { calls: 3 }, { calls }] });
          put('none', { steps: {} });
        }"""
    )
    page.reload()
    shown.wait_for_controls()
    for chat, text in (("old", "Before"), ("odd", ""), ("none", "")):
        page.click(f"#chat-list >> text={chat}")
        expect(page.locator(".md").last).to_have_text(text)
    shown.play("Yes.")
    shown.ask("And now?")
    expect(shown.answer().locator(".md")).to_have_text("Yes.")


def test_long_calls_fit_a_phone(browser: Any, url: str) -> None:
    shown = PlaygroundPage(browser, url, phone=True)
    shown.play_answers([call_delta(0, "n" * 300, "a" * 3000)], [{"content": "Sorry."}])
    shown.ask("Call.")
    shown.answer()
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert shown.page.locator(".call").evaluate("one => one.scrollWidth <= one.clientWidth")
    shown.close()


CALCULATED = {
    "12*7": 84, "2 + 3 * 4": 14, "(2+3)×4": 20, "-2^2": -4, "2^3^2": 512, "2**-1": 0.5, "7 % 4": 3,
    "0.1+0.2": 0.3, "1e3/8": 125, "sqrt(16) + max(1, 2, 3)": 7, "SIN(0) * pi": 0, "--3": 3,
    ".5 − 1.": -0.5, "10 ÷ 4": 2.5, "ln(e)": 1, "1/0": "It divides by zero.",
    "sqrt(-1)": "The result is not a real number.", "9^999": "The result is too large.",
    "": "A number is missing at the end.", "2 3": "'3' is not expected here.",
    "(1": "')' is missing at the end.", "abs(1, 2)": "')' is missing before ','.",
    "alert(1)": "'alert' is not known; there are: ", "constructor": "'constructor' is not known",
    "1;2": "';' cannot be calculated with.", "__proto__": "'_' cannot be calculated with.",
    "(" * 60: "It is nested more than 50 deep.", "-" * 60: "It is nested more than 50 deep.",
    "1" * 501: "It is longer than 500 characters.",
}  # fmt: skip


def test_the_calculator_reads_arithmetic_and_nothing_else(shown: PlaygroundPage) -> None:
    found = shown.page.evaluate(
        """async (expressions) => {
          const { calculate } = await import('/playground/calculator.js');
          return expressions.map((one) => {
            try { return calculate(one); } catch (error) { return error.message; }
          });
        }""",
        list(CALCULATED),
    )
    for (expression, expected), result in zip(CALCULATED.items(), found, strict=True):
        if isinstance(expected, str):
            assert str(result).startswith(expected), expression
        else:
            assert result == expected, expression


def test_the_clock_knows_large_cities_and_time_zones(shown: PlaygroundPage) -> None:
    found = shown.page.evaluate(
        """async (places) => {
          const { timeIn } = await import('/playground/clock.js');
          return places.map((place) => {
            try {
              return Object.values(timeIn(place, new Date('2026-12-31T23:05:00Z'))).join(' ');
            } catch (error) { return error.message; }
          });
        }""",
        ["Tokyo", "osaka", "New York", "Zürich", "Paris, France", "America/Lima", "UTC", "Nowhere"],
    )
    assert found[:-1] == [
        *["0805 Friday, 1 January 2027"] * 2,
        "1805 Thursday, 31 December 2026",
        *["0005 Friday, 1 January 2027"] * 2,
        "1805 Thursday, 31 December 2026",
        "2305 Thursday, 31 December 2026",
    ]
    assert found[-1].startswith("No time zone is known for 'Nowhere'.")


def test_a_newcomer_sees_the_built_in_model_call_the_clock_and_think(
    shown: PlaygroundPage,
) -> None:
    page = shown.page
    page.click("text=What time is it in Tokyo?")
    expect(page.locator("#toast")).to_contain_text("may call the clock")
    answer = shown.answer()
    state, name, arguments, result = card(shown)
    assert (state, name, arguments) == ("done", "get_time", '{"city": "Tokyo"}')
    assert (
        answer.locator(".md").last.inner_text() == f"It is {json.loads(result)['result']} in Tokyo."
    )
    offer(shown, "calculate", "roll_dice")
    shown.set(temperature=0)
    shown.ask("What is 12 * 7?")
    answer = shown.answer()
    assert answer.locator(".md").inner_text() == "84"
    expect(answer.locator("details.think > summary")).to_contain_text("Thought")
    shown.ask("What time is it in Berlin?")
    answer = shown.answer()
    assert answer.locator(".call").get_attribute("data-state") == "done"
    assert re.fullmatch(r"It is \d{4} in Berlin\.", answer.locator(".md").last.inner_text())
