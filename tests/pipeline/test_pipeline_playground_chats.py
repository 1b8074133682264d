"""The playground's conversations and settings: kept over a reload, many, edited, undone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.pipeline.browser import CHROMIUM, PlaygroundPage, shared_chromium, sync_api
from support.pipeline.served import NULL, Served, SharedServers

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

expect = sync_api.expect


@pytest.fixture(scope="module")
def server(shared_server: SharedServers) -> Served:
    return shared_server(*NULL)


@pytest.fixture(scope="module")
def browser() -> Any:
    return shared_chromium()


@pytest.fixture(scope="module")
def tab(browser: Any, server: Served) -> Iterator[PlaygroundPage]:
    one = PlaygroundPage(browser, server.url)
    yield one
    one.close()


@pytest.fixture
def shown(tab: PlaygroundPage) -> Iterator[PlaygroundPage]:
    tab.renew()
    yield tab
    tab.check_faults()


def ask(shown: PlaygroundPage, question: str, answer: str) -> None:
    shown.play(answer)
    shown.ask(question)
    expect(shown.answer().locator(".md")).to_have_text(answer)
    shown.page.unroute("**/v1/chat/completions")


def titles(shown: PlaygroundPage) -> list[str]:
    found: list[str] = shown.page.locator("#chat-list .open").all_inner_texts()
    return found


def asked(shown: PlaygroundPage) -> list[str]:
    return [message["content"] for message in shown.asked[-1]["messages"]]


def test_a_reload_keeps_the_conversation_the_system_prompt_and_the_settings(
    shown: PlaygroundPage,
) -> None:
    page = shown.page
    shown.set(temperature=0.25)
    page.fill("#system", "Be brief.")
    shown.check("ignore_eos")
    shown.play("One\n\n- a\n- b")
    shown.ask("First?")
    shown.answer()
    ask(shown, "Second?", "Two")
    stats = shown.answer().locator(".stats").inner_text()
    page.reload()
    shown.wait_for_controls()
    assert page.locator(".question p").all_inner_texts() == ["First?", "Second?"]
    assert page.locator(".answer li").all_inner_texts() == ["a", "b"]
    assert shown.answer().locator(".stats").inner_text() == stats
    expect(page.locator("#sampling-temperature")).to_have_value("0.25")
    expect(page.locator("#sampling-ignore_eos")).to_be_checked()
    expect(page.locator("#rare-count")).to_have_text("1 set")
    expect(page.locator("#settings")).to_be_visible()
    ask(shown, "Third?", "Three")
    assert asked(shown) == ["Be brief.", "First?", "One\n\n- a\n- b", "Second?", "Two", "Third?"]
    assert shown.asked[-1]["temperature"] == 0.25


def test_an_answer_that_a_reload_cuts_off_is_kept_as_far_as_it_came(shown: PlaygroundPage) -> None:
    page = shown.page
    shown.check("ignore_eos")
    shown.ask("Go on for ever.")
    shown.answer("streaming")
    expect(page.locator(".answer .md")).to_have_text(re.compile(".{20}", re.DOTALL))
    page.reload()
    answer = shown.answer()
    assert len(answer.locator(".md").inner_text()) > 20
    expect(answer.locator(".notice")).to_contain_text("before this answer was complete")
    answer.get_by_role("button", name="Try again").click()
    expect(shown.answer("streaming").locator(".notice")).to_be_hidden()
    page.click("#stop")


def test_several_chats_are_listed_switched_renamed_deleted_and_had_back(
    shown: PlaygroundPage,
) -> None:
    page = shown.page
    ask(shown, "What is the first chat about?", "This")
    page.click("#new-chat")
    expect(page.locator("#welcome")).to_be_visible()
    assert page.locator("article").count() == 0
    ask(shown, "A long question " + "with many words " * 10, "That")
    assert titles(shown) == [
        "A long question with many words with many words with many…",
        "What is the first chat about?",
    ]
    page.click("text=What is the first chat about?")
    expect(page.locator(".answer .md")).to_have_text("This")
    page.hover("#chat-list li:last-child")
    page.get_by_role("button", name="Rename: What is the first chat").click()
    page.keyboard.type("Mine")
    page.keyboard.press("Enter")
    assert "Mine" in titles(shown)
    assert page.title() == "Mine – Penstock"
    page.hover("#chat-list li:last-child")
    page.get_by_role("button", name="Delete: Mine").click()
    assert len(titles(shown)) == 1
    expect(page.locator("#welcome")).to_be_visible()
    page.reload()
    shown.wait_for_controls()
    assert len(titles(shown)) == 1
    page.hover("#chat-list li")
    page.get_by_role("button", name="Delete: A long").click()
    assert titles(shown) == []
    page.get_by_role("button", name="Undo").click()
    page.reload()
    shown.wait_for_controls()
    page.click("#chat-list .open")
    expect(page.locator(".answer .md")).to_have_text("That")


def test_an_answer_goes_on_while_another_chat_is_shown(shown: PlaygroundPage) -> None:
    page = shown.page
    shown.set(max_tokens=400)  # four seconds
    shown.check("ignore_eos")
    shown.ask("Count.")
    shown.answer("streaming")
    page.click("#new-chat")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#chat-list .busy")).to_have_count(1)
    ask(shown, "Another?", "Yes")
    expect(page.locator("#chat-list .busy")).to_have_count(0, timeout=20_000)
    page.click("#chat-list >> text=Count.")
    expect(shown.answer().locator(".stats")).to_contain_text("400 tokens")


def test_a_question_can_be_edited_and_what_that_replaces_can_be_had_back(
    shown: PlaygroundPage,
) -> None:
    page = shown.page
    ask(shown, "First?", "One")
    ask(shown, "Second?", "Two")
    page.hover(".question >> nth=0")
    page.get_by_role("button", name="Edit the question").first.click()
    page.keyboard.press("Escape")
    assert page.locator(".question p").all_inner_texts() == ["First?", "Second?"]
    page.get_by_role("button", name="Edit the question").first.click()
    field = page.get_by_role("textbox", name="Edit the question")
    expect(field).to_have_value("First?")
    field.fill("Changed?")
    shown.play("Other")
    field.press("Enter")
    expect(shown.answer().locator(".md")).to_have_text("Other")
    assert page.locator(".question p").all_inner_texts() == ["Changed?"]
    assert asked(shown) == ["Changed?"]
    page.get_by_role("button", name="Undo").click()
    assert page.locator(".question p").all_inner_texts() == ["First?", "Second?"]
    assert page.locator(".answer .md").all_inner_texts() == ["One", "Two"]
    page.locator(".answer").first.get_by_role("button", name="Regenerate").click()
    expect(shown.answer().locator(".md")).to_have_text("Other")
    assert asked(shown) == ["First?"]


def test_what_is_stored_and_cannot_be_read_is_ignored(shown: PlaygroundPage) -> None:
    page = shown.page
    ask(shown, "Kept?", "Yes")
    page.evaluate(
        """() => {
          const prefix = `penstock:${location.pathname}:`;
          const put = (key, value) => localStorage.setItem(prefix + key, value);
          const wrong = { system: 7, sampling: { seed: [], temperature: 'x' }, panels: { a: 1 } };
          put('settings', JSON.stringify({ version: 1, ...wrong }));
          put('chat:a', '{"version":1,"turns":[{"quest');
          put('chat:b', 'null');
          put('chat:c', '{"version":99,"turns":[{"question":"q","text":"t"}]}');
          put('chat:d', '{"version":1,"turns":[7,null,{"question":8},[]]}');
          const odd = { given: {}, updated: 'x', turns: [{ question: 'Odd?', text: 5 }] };
          put('chat:e', JSON.stringify({ version: 1, ...odd }));
          sessionStorage.setItem(prefix + 'shown', 'a');
        }"""
    )
    page.reload()
    shown.wait_for_controls()
    assert titles(shown) == ["Kept?", "Odd?"]
    ask(shown, "Still works?", "Yes")
    assert len(titles(shown)) == 3


def test_what_is_stored_is_bounded_and_a_full_storage_is_said(shown: PlaygroundPage) -> None:
    page = shown.page
    count, length, cut, newest = page.evaluate(
        """async () => {
          const { writeChat, readChat, chatIds } = await import('/playground/storage.js');
          const turn = (size) => ({ question: 'q', text: 'x'.repeat(size), ended: true });
          for (let i = 0; i < 70; i += 1) {
            writeChat({ id: `c${i}`, updated: i, turns: [turn(60_000)] });
          }
          const turns = Array.from({ length: 40 }, () => turn(50_000));
          writeChat({ id: 'long', updated: 99, turns });
          const length = Object.values(localStorage).reduce((sum, one) => sum + one.length, 0);
          const { cut, turns: left } = readChat('long');
          return [chatIds().length, length, cut && left.length > 3, readChat('c69') !== null];
        }"""
    )
    assert count <= 50
    assert length <= 2_100_000
    assert cut is True
    assert newest is True
    page.evaluate(
        """() => {
          Storage.prototype.setItem = () => { throw new DOMException('full'); };
        }"""
    )
    ask(shown, "Lost?", "Perhaps")
    expect(page.locator("#toast")).to_contain_text("cannot keep this chat")


def test_two_tabs_see_each_others_chats(shown: PlaygroundPage) -> None:
    other = shown.context.new_page()
    other.goto(shown.url + "/")
    expect(other.locator("#no-chats")).to_be_visible()
    ask(shown, "From the first tab?", "Yes")
    expect(other.locator("#chat-list .open")).to_have_text("From the first tab?")
    other.click("#chat-list .open")
    expect(other.locator(".answer .md")).to_have_text("Yes")
