"""A model's Markdown on the playground's page: what it becomes, and what it never may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.pipeline.browser import CHROMIUM, PlaygroundPage, shared_chromium, sync_api
from support.pipeline.served import NULL, SharedServers

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

expect = sync_api.expect

DOCUMENT = """# One

Some **bold**, *lean*, ~~old~~ and `code`, [a link](https://example.org/a) \\* &lt;b&gt;
and a second line

3. third
   - [x] inner

     apart
   - [ ] more
4. fourth

| a | b |
|:--|--:|
| 1 | `2` |
| 3 | 4<br>5 |

> quoted
> > twice

```py
x = 1

y = 2
```

---

![alt](https://example.org/x.png) [later][ref]

[ref]: https://example.org/ref
"""
EVIL = """<script>window.hit = 1</script>

<img src=x onerror="window.hit = 2"> <b onclick="window.hit = 3">bold</b>

<svg onload="window.hit = 4"><a xlink:href="javascript:window.hit=5"><text>x</text></a></svg>

[one](javascript:window.hit=6) [two](JaVaScRiPt:window.hit=7) [three](&#106;avascript:window.hit=8)
[four](java\tscript:window.hit=9) [five](<javascript:window.hit=10>) <javascript:window.hit=11>
[six](data:text/html,<script>window.hit=12</script>) [seven](vbscript:x)
[eight](//elsewhere.example/x) [nine](/v1/models "title' onmouseover='window.hit=13")
[ten](file:///etc/passwd) [eleven][r]
![twelve](javascript:window.hit=14) ![thirteen](data:image/svg+xml,<svg/onload=window.hit=15>)
![fourteen](https://elsewhere.example/x.png "t") [![fifteen](//elsewhere.example/y.png)](https://e.example)

[r]: javascript:window.hit=16

<iframe src="https://elsewhere.example"></iframe><style>body { display: none }</style>
<form action="https://elsewhere.example"><input type=submit></form>

```html" onload="window.hit=17
<script>window.hit = 18</script>
```

| <script>window.hit=19</script> | <img src=x onerror=window.hit=20> |
| --- | --- |
| `<svg onload=window.hit=21>` | <https://good.example/?a="b> |
"""
GOOD_LINKS = [
    "https://elsewhere.example/x.png",
    "https://e.example/",
    "https://good.example/?a=%22b",
]
ELEMENTS = {
    *("DETAILS", "SUMMARY", "DIV", "P", "SPAN", "A", "BR", "STRONG", "EM", "DEL", "CODE", "PRE"),
    *("UL", "OL", "LI", "BLOCKQUOTE", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "HR", "BUTTON"),
    *("INPUT", "H3", "H4", "H5", "H6"),
}


@pytest.fixture(scope="module")
def url(shared_server: SharedServers) -> str:
    return shared_server(*NULL).url


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


def answer_to(shown: PlaygroundPage, *pieces: str) -> Any:
    shown.play(*pieces)
    shown.ask("Go on.")
    return shown.answer()


def test_markdown_becomes_headings_lists_tables_quotes_code_and_links(
    shown: PlaygroundPage,
) -> None:
    text = answer_to(shown, DOCUMENT).locator(".md")
    assert text.locator("> h3").inner_text() == "One"
    first = text.locator("> p").first
    assert first.inner_text() == "Some bold, lean, old and code, a link * <b>\nand a second line"
    for mark, marked in (("strong", "bold"), ("em", "lean"), ("del", "old"), ("code", "code")):
        assert first.locator(mark).inner_text() == marked
    assert text.locator("> ol").get_attribute("start") == "3"
    assert text.locator("> ol > li").count() == 2
    assert text.locator("ol ul input:disabled").count() == 2
    assert text.locator("ol ul input:checked").count() == 1
    assert text.locator("tr").all_inner_texts() == ["a\tb", "1\t2", "3\t4\n5"]
    assert text.locator("td.right").count() == 2
    assert text.locator("> blockquote > blockquote > p").inner_text() == "twice"
    assert text.locator("pre").inner_text() == "x = 1\n\ny = 2"
    assert text.locator("pre").get_attribute("aria-label") == "Code, py"
    assert text.locator("> hr").count() == 1
    links = text.locator("a").evaluate_all(
        "all => all.map((one) => [one.textContent, one.href, one.target, one.rel])"
    )
    assert links == [
        [label, f"https://example.org/{path}", "_blank", "noopener noreferrer"]
        for label, path in (("a link", "a"), ("Image: alt", "x.png"), ("later", "ref"))
    ]


def test_a_models_text_never_becomes_markup_script_or_a_request(shown: PlaygroundPage) -> None:
    page = shown.page
    for pieces in ([EVIL], list(EVIL), ["<think>", EVIL, "</think>", EVIL]):
        answer = answer_to(shown, *pieces)
        found = answer.locator(".text *").evaluate_all(
            "all => all.map((one) => [one.tagName, ...one.getAttributeNames()])"
        )
        assert {tag for tag, *_ in found} <= ELEMENTS
        assert not {name for _, *names in found for name in names if name.startswith("on")}
        assert answer.locator(".text").locator("[style], [src], [srcset], [action]").count() == 0
        links = answer.locator(".md a").evaluate_all("all => all.map((one) => one.href)")
        assert links == GOOD_LINKS
        answer.locator("details.think").evaluate("one => { one.open = true; }")
        said = answer.locator(".text").inner_text()
        assert "<script>window.hit = 1</script>" in said
        assert "[one](javascript:window.hit=6)" in said
        assert page.evaluate("window.hit") is None


def test_a_title_or_a_question_never_becomes_markup(shown: PlaygroundPage) -> None:
    page = shown.page
    evil = "<img src=x onerror=window.hit=1>"
    shown.play("Yes.")
    shown.ask(evil)
    shown.answer()
    assert page.locator("#chat-list .open").inner_text() == evil
    assert page.locator(".question p").inner_text() == evil
    assert page.title() == f"{evil} – Penstock"
    page.reload()
    shown.answer()
    assert page.locator("#chat-list img, .question img").count() == 0
    assert page.evaluate("window.hit") is None


def test_thinking_is_folded_and_not_sent_back(shown: PlaygroundPage) -> None:
    answer = answer_to(
        shown,
        *("<thi", "nk>a secret\nthought</think>\n\nSay **this** `now`\n\n``"),
        "`py\nprint('</think><b>')\n```\nend",
    )
    assert answer.locator(".md > p").all_inner_texts() == ["Say this now", "end"]
    assert answer.locator("pre").inner_text() == "print('</think><b>')"
    thought = answer.locator("details.think > div")
    assert not thought.is_visible()
    answer.locator("details.think > summary").click()
    assert thought.inner_text() == "a secret\nthought"
    shown.ask("And now?")
    shown.answer()
    history = json.dumps(shown.asked[1]["messages"])
    assert "secret" not in history
    assert "print('</think><b>')" in history


def test_the_shown_text_is_the_same_however_it_arrives_in_pieces(shown: PlaygroundPage) -> None:
    texts = [
        DOCUMENT,
        EVIL,
        "<think>one\n```\ntwo</think>\nthree\n\n~~~js\n`4`\n\n</think>\n~~~\n`five`",
        "no start of thought\n\nmore</think>**a** ``` and\n````a\n```\n````\n\n\nend",
        "```\nnever closed <think>\n\n",
        "intro\na | b\n--|-x\n\n1. a\n\n2. b\n\n   c\n\n\n- d\n\ntext\n===\n\n> q\nlazy\n",
    ]
    different = shown.page.evaluate(
        """async (texts) => {
          const { TextView } = await import('/playground/render.js');
          const show = (cuts, text) => {
            const node = document.createElement('div');
            const view = new TextView(node);
            for (const cut of cuts) view.show(text.slice(0, cut), false);
            view.show(text, true);
            return node.innerHTML;
          };
          return texts.filter((text) => {
            const every = Array.from(text, (_, i) => i);
            const some = every.filter((i) => i % 7 === 3);
            const tags = every.filter((i) => text[i] === '<' || text[i - 1] === '>');
            const whole = show([], text);
            return [every, some, tags].some((cuts) => show(cuts, text) !== whole);
          });
        }""",
        texts,
    )
    assert different == []


def test_what_stands_above_a_growing_text_is_neither_read_nor_made_again(
    shown: PlaygroundPage,
) -> None:
    """The characters that the parser reads grow with the text, not with its square; the nodes of
    blocks that are whole stay, and with them what the reader has selected."""
    read, length, kept = shown.page.evaluate(
        """async () => {
          const { Lexer } = await import('/playground/marked.js');
          const { TextView } = await import('/playground/render.js');
          let read = 0;
          const blockTokens = Lexer.prototype.blockTokens;
          Lexer.prototype.blockTokens = function (text, ...rest) {
            read += text.length;
            return blockTokens.call(this, text, ...rest);
          };
          const paragraph = (_, i) => `Paragraph **${i}** of many.\\n\\n`;
          const text = Array.from({ length: 300 }, paragraph).join('');
          const node = document.createElement('div');
          const view = new TextView(node);
          let first = null;
          for (let cut = 0; cut <= text.length; cut += 10) {
            view.show(text.slice(0, cut), false);
            first ??= node.querySelector('.md > *');
          }
          view.show(text, true);
          Lexer.prototype.blockTokens = blockTokens;
          return [read, text.length, first === node.querySelector('.md > *')];
        }"""
    )
    assert length < read < 12 * length
    assert kept is True


def test_a_text_that_is_hard_to_read_is_shown_all_the_same(shown: PlaygroundPage) -> None:
    for text in (">" * 20_000, "_a" * 20_000, "- " * 400 + "deep", "[" * 20_000, "<" * 20_000):
        answer = answer_to(shown, text[: len(text) // 2], text[len(text) // 2 :], "\n\nThe end.")
        assert answer.locator(".notice").is_hidden(), text[:9]
        assert answer.locator(".text").evaluate("one => one.textContent.length") > 100, text[:9]
        assert answer.locator(".text").inner_text().endswith("The end."), text[:9]
        shown.page.unroute("**/v1/chat/completions")
        shown.page.click("#new-chat")
