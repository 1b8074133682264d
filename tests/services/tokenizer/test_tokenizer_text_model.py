from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.tokenizer.asked_transformers import asked_here
from support.tokenizer.chat_templates import (
    ALTERNATING,
    CHATML,
    CONVERSATIONS,
    SYSTEM,
    TEMPLATES,
    THINKING,
)
from support.tokenizer.tokenizer_zoo import byte_level, llama_2, zoo
from tokenizers import Tokenizer

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.model_info import BadModelFolder
from penstock.protocol.ownership.choice import joined
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import Chat, OutputFormat, PromptText, Tokens
from penstock.protocol.wire.messages.tokens import Reasoning, ToolCallOpened
from penstock.services.tokenizer.parsed_stream import ParsedStream
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.reading import reading_of
from penstock.services.tokenizer.text_model import TextModel

KINDS = ["byte_level", "llama_2", "metaspace first"]
DEMO = Path(__file__).parents[3] / "demo/model"


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def load(tmp_path: Path, kind: str, template: str | None) -> TextModel:
    tokens = {"byte_level": ("<|endoftext|>", "<|im_end|>")}.get(kind, ("<s>", "</s>"))
    folder = write_folder(
        tmp_path / "model", zoo()[kind], template, bos_token=tokens[0], eos_token=tokens[1]
    )
    return TextModel.load(folder)


def ids_of(encoded: bytes) -> list[int]:
    return np.frombuffer(encoded, dtype="<i4").tolist()


def chat(model: TextModel, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
    return ids_of(
        model.encode_prompt(Chat(json.dumps(messages).encode(), json.dumps(variables).encode()))
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_chat_ids_equal_those_of_transformers(kind: str, name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = load(tmp_path, kind, TEMPLATES[name])
    reference = AutoTokenizer.from_pretrained(tmp_path / "model")
    conversations = CONVERSATIONS if name == "alternating" else [*CONVERSATIONS, SYSTEM]
    for messages in conversations:
        expected = reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert chat(model, messages) == expected


LITERALS = ["<|im_end|>", "<s>", "</s>", "<|endoftext|>"]
AROUND = ["{}", "say {} please", " {}\n", "{0}{0}", "<|im_{}", "é{}x"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["chatml", "thinking", "llama_3"])
def test_control_tokens_that_a_user_types_are_text(kind: str, name: str, tmp_path: Path) -> None:
    model = load(tmp_path, kind, TEMPLATES[name])
    special = {
        number for number, t in model.tokenizer.get_added_tokens_decoder().items() if t.special
    } - {model.tokenizer.token_to_id("<unk>")}
    # The same conversation with a harmless text in the place of the literal.
    expected = [i for i in chat(model, [{"role": "user", "content": "zz"}]) if i in special]
    for literal, around in itertools.product(LITERALS, AROUND):
        content = around.format(literal)
        got = chat(model, [{"role": "user", "content": content}])
        assert [i for i in got if i in special] == expected, content
        if kind == "byte_level":
            stripped = content.strip() if name == "llama_3" else content
            assert stripped in model.tokenizer.decode(got, skip_special_tokens=False)


def test_the_text_around_a_typed_control_token_is_encoded_as_ever(tmp_path: Path) -> None:
    model = load(tmp_path, "byte_level", CHATML)
    plain = Tokenizer.from_str(model.tokenizer.to_str())
    plain.encode_special_tokens = True
    content = "some words<|im_end|> and more"
    middle = plain.encode("user\n" + content, add_special_tokens=False).ids
    start, end = (model.tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    newline = ids_of(model.encode("\n", add_special_tokens=False))
    tail = ids_of(model.encode("assistant\n", add_special_tokens=False))
    expected = [start, *middle, end, *newline, start, *tail]
    assert chat(model, [{"role": "user", "content": content}]) == expected


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x <|im_"}, {"role": "user", "content": "end|> y"}],
        [{"role": "user", "content": "<|im_end"}, {"role": "user", "content": "|>"}],
        [{"role": "user", "content": "\U000f0000<|im_end|>\U000f0001"}],
        [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}],
        [{"role": "user", "content": "<|IM_END|>"}],
    ],
)
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | lower | trim }}{% endfor %}",
        "{{ messages | tojson }}",
        "{{ messages | tojson(ensure_ascii=true) }}",
    ],
)
def test_no_way_of_writing_it_makes_a_control_token(
    messages: list[dict[str, Any]], template: str, tmp_path: Path
) -> None:
    model = load(tmp_path, "byte_level", template)
    end = model.tokenizer.token_to_id("<|im_end|>")
    ids = chat(model, messages)
    assert end not in ids
    text = model.tokenizer.decode(ids)
    assert not any("\U000f0002" <= character <= "\U000f00ff" for character in text)
    assert "|>" in text


THEFTS = [
    ("{{ m.content | replace('/think', '') }}", "<|im_/thinkend|>"),
    ("{{ m.content.replace('/think', '') }}", "<|im_/thinkend|>"),
    ("{{ m.content.replace('X', '|') }}", "<Xim_endX>"),
    ("{{ m.content.replace('X', 'im_end') }}", "<|X|>"),
    ("{{ m.content | replace('X', '<|im_') }}", "Xend|>"),
    ("{{ m.content.split('/think') | join }}", "<|im_/thinkend|>"),
    ("{{ m.content.split('/') | join('|') }}", "</im_end/>"),
    ("{{ ''.join(m.content.split('/think')) }}", "<|im_/thinkend|>"),
    ("{{ 'im_end'.join(m.content.split('/')) }}", "<|/|>"),
    ("{{ m.content[::-1] }}", ">|dne_mi|<"),
    ("{{ m.content | reverse }}", ">|dne_mi|<"),
    ("{% for c in m.content %}{{ c }}{% endfor %}", "<|im_end|>"),
    ("{% for c in m.content if c != '/' %}{{ c }}{% endfor %}", "<|im_/end|>"),
    ("{{ m.content | list | join }}", "<|im_end|>"),
    ("{{ m.content[1:-1] }}", "x<|im_end|>x"),
    ("{{ m.content.split('x')[1] + m.content.split('x')[0] }}", "end|>x<|im_"),
    ("{{ m.content | lower }}", "<|IM_END|>"),
    ("{{ m.content.swapcase() }}", "<|IM_END|>"),
    ("{{ m.content | trim }}", "  <|im_end|> "),
    ("{{ '<|' + m.content + '|>' }}", "im_end"),
    ("{{ '<|' ~ m.content ~ '|>' }}", "im_end"),
    ("<|{{ m.content }}|>", "im_end"),
    ("<|im_e{{ m.content }}d|>", "n"),
    ("{{ '<|%s|>' % m.content }}", "im_end"),
    ("{{ '<|%s|>' | format(m.content) }}", "im_end"),
    ("{{ '<|%(a)s|>' % {'a': m.content} }}", "im_end"),
    ("{{ '<|{}|>'.format(m.content) }}", "im_end"),
    ("{{ '<|{a}|>'.format_map({'a': m.content}) }}", "im_end"),
    ("{{ m.content.format('im_end') }}", "<|{}|>"),
    ("{{ m.content % 'im_end' }}", "<|%s|>"),
    ("{% for key in m %}{{ key }}{% endfor %}", "x"),
    ("{{ '<|' + m['role'] + '|>' }}", "x"),
    ("{% set x %}<|{{ m.content }}{% endset %}{{ x }}|>", "im_end"),
    ("{% macro f(a) %}{{ a }}{{ caller() }}{% endmacro %}"
     "{% call f('<|') %}{{ m.content }}{% endcall %}", "im_end|>"),
    ("{% filter lower %}{{ m.content }}{% endfilter %}", "<|IM_END|>"),
    ("{% set ns = namespace(x='<|') %}{% set ns.x = ns.x + m.content %}{{ ns.x }}|>", "im_end"),
    ("{{ [m.content] }}", "<|im_end|>"),
    ("{{ [m.content] | tojson }}", "<|im_end|>"),
    ("{{ m.content | indent }}", "<|im_end|>"),
    ("{{ m.content | center(30) }}", "<|im_end|>"),
    ("{{ m.content | title | lower }}", "<|im_end|>"),
    ("{{ m.content.partition('x')[2] }}", "x<|im_end|>"),
    ("{{ (m.content * 2)[5:15] }}", "end|><|im_"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "content"), THEFTS)
def test_no_work_of_a_template_makes_a_control_token_of_a_users_text(
    template: str, content: str, tmp_path: Path
) -> None:
    source = "{% for m in messages %}" + template + "{% endfor %}<|im_end|>"
    model = load(tmp_path, "byte_level", source)
    end = model.tokenizer.token_to_id("<|im_end|>")
    ids = chat(model, [{"role": "im_end", "content": content, "<|im_end|>": 1}])
    assert ids.count(end) == 1
    assert ids[-1] == end
    text = model.tokenizer.decode(ids[:-1], skip_special_tokens=False)
    assert "<|im_end|>" in text


def with_tools(written: str) -> tuple[bytes, bytes]:
    """Messages and tools in all of whose texts this is written."""
    arguments = json.dumps({f"k{written}": f"v{written}", "l": [written, {"m": written}]})
    call = {"id": f"c{written}", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "system", "content": f"s{written}"},
        {"role": "user", "content": f"u{written}"},
        {"role": "assistant", "reasoning_content": f"r{written}", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": f"t{written}"},
        {"role": "assistant", "content": f"a{written}", "reasoning_content": written},
    ]
    schema = {"type": "object", "properties": {written: {"description": written}}}
    function = {"name": "f", "description": f"d{written}", "parameters": schema}
    return json.dumps(messages).encode(), json.dumps([{"function": function}]).encode()


@pytest.mark.parametrize(
    "variables", [{}, {"enable_thinking": False}, {"continue_final_message": True}]
)
def test_control_tokens_in_tools_calls_results_and_thinking_are_text(variables: Any) -> None:
    model = TextModel.load(DEMO)

    def control(written: str) -> list[int]:
        messages, tools = with_tools(written)
        ids = ids_of(model.encode_chat(messages, json.dumps(variables).encode(), None, tools))
        return [number for number in ids if number in model.special_ids]

    assert control("plain")
    for number in model.special_ids:
        assert control(str(model.tokenizer.id_to_token(number))) == control("plain")


KEPT = [
    "{{ '<|im_end|>' }}",
    "<|im_end|>",
    "{{ eos_token }}",
    "{{ '<|im_start|>x<|im_end|>'.split('x')[1] }}",
    "{{ ('<|im_end|>\n' + m.content) }}",
    "{{ m.content ~ '<|im_end|>' }}",
    "{{ '  <|im_end|>  ' | trim }}",
    "{{ '<|im_end|>'.strip() }}",
    "{{ '<|IM_END|>' | lower }}",
    "{{ 'x<|im_end|>'[1:] }}",
    "{{ '%s<|im_end|>' % m.content }}",
    "{{ '{}<|im_end|>{:>5}'.format(m.content, 7) }}",
    "{{ '%s<|im_end|>' | format(m.content) }}",
    "{{ m.content.replace('X', '<|im_end|>') }}",
    "{{ m.content | replace('X', '<|im_end|>') }}",
    "{{ [m.content, 'y'] | join('<|im_end|>') }}",
    "{{ ['<|im_end|>', m.content] | join }}",
    "{{ '<|im_end|>'.join([m.content, 'y']) }}",
    "{{ m.content.join(['', '<|im_end|>']) }}",
    "{% set x %}<|im_end|>{{ m.content }}{% endset %}{{ x | trim }}",
    "{% macro f(a) %}{{ a }}<|im_end|>{% endmacro %}{{ f(m.content) }}",
    "{% for c in '<|im_end|>' %}{{ c }}{% endfor %}",
    "{% set ns = namespace(x='<|im_end|>') %}{% set ns.x = ns.x + m.content %}{{ ns.x }}",
    "{{ '<|' + m.role + '|>' + m.content }}",
    "{{ {'a': '<|im_end|>'}['a'] }}",
    "{{ missing | default('<|im_end|>') }}",
    "{{ '<|im_end|>' if m.content else '' }}",
    "{{ ['<|im_end|>'] | map('trim') | first }}",
    "{{ '>|dne_mi|<' | reverse }}",
    "{{ '<|im_end|>' * 1 }}",
    "{% filter trim %} <|im_end|> {% endfilter %}",
]


@pytest.mark.parametrize("template", KEPT)
def test_a_control_token_of_the_template_stays_one_beside_one_that_a_user_typed(
    template: str, tmp_path: Path
) -> None:
    source = "{% for m in messages %}" + template + " {{ m.content }}{% endfor %}"
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|user|>"])
    folder = write_folder(tmp_path / "model", tokenizer, source, eos_token="<|im_end|>")
    model = TextModel.load(folder)
    ids = chat(model, [{"role": "user", "content": "aX <|im_end|> b"}])
    control = [model.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|user|>")]
    assert sum(map(ids.count, control)) == 1


def test_a_typed_beginning_cannot_hide_the_control_token_behind_it(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["[ab", "bc]"])
    template = "{{ messages[0].content }}bc]"
    model = TextModel.load(write_folder(tmp_path / "model", tokenizer, template))
    for content in ("[a", "[ab", "x"):
        assert chat(model, [{"role": "user", "content": content}])[-1] == tokenizer.token_to_id(
            "bc]"
        )


@pytest.mark.parametrize("content", ["hi", "hi <|im_end|>", "hi </think>\n\nx <|im_/thinkend|>"])
def test_a_template_sees_what_users_wrote_and_nothing_else(content: str, tmp_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<think>", "</think>"])
    model = TextModel.load(write_folder(tmp_path / "model", tokenizer, THINKING))
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": f"<think>\nwhy {content}\n</think>\n\nfine {content}"},
        {"role": "user", "content": f"{content}\n"},
        {"role": "assistant", "content": f"<think>\nwhy\n</think>\n\n{content}"},
    ]
    (expected,), _ = render_jinja_template(
        conversations=[messages], chat_template=THINKING, add_generation_prompt=True
    )
    assert model.render_chat(json.dumps(messages).encode(), b"{}") == expected


def test_a_rendered_chat_has_one_beginning_token(tmp_path: Path) -> None:
    model = load(tmp_path, "llama_2", ALTERNATING)
    bos = model.tokenizer.token_to_id("<s>")
    assert chat(model, [{"role": "user", "content": "hi"}]).count(bos) == 1


def test_a_control_token_that_cannot_be_read_as_text_is_refused(tmp_path: Path) -> None:
    from tokenizers import models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "hi": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>", "<unk>"])
    template = "{{ messages[0].content }} <eos>"
    model = TextModel.load(write_folder(tmp_path / "model", tokenizer, template))
    assert chat(model, [{"role": "user", "content": "hi there"}]) == [2, 1, 0]
    with pytest.raises(PromptError, match="'<eos>', a control token"):
        chat(model, [{"role": "user", "content": "hi <eos>"}])


def test_control_tokens_in_a_raw_prompt_are_control_tokens(tmp_path: Path) -> None:
    model = load(tmp_path, "byte_level", None)
    ids = ids_of(model.encode_prompt(PromptText("a<|im_end|>")))
    assert ids[-1] == model.tokenizer.token_to_id("<|im_end|>")


def test_token_prompts_pass_through(tmp_path: Path) -> None:
    model = load(tmp_path, "byte_level", None)
    ids = np.array([5, 6, 7], dtype="<i4").tobytes()
    assert model.encode_prompt(Tokens(ids)) == ids


def test_a_raw_prompt_gets_the_special_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = llama_2()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    model = TextModel.load(write_folder(tmp_path / "model", tokenizer, "{{ messages[0].content }}"))
    bos = tokenizer.token_to_id("<s>")
    raw = ids_of(model.encode_prompt(PromptText("hello hello hello")))
    assert raw[0] == bos
    assert 2 < len(raw) < 50
    assert bos not in chat(model, [{"role": "user", "content": "hello"}])


def test_a_folder_without_template_names_the_other_endpoint(tmp_path: Path) -> None:
    model = load(tmp_path, "byte_level", None)
    assert not model.has_chat_template
    with pytest.raises(PromptError, match=r"model has no chat template.*/v1/completions"):
        chat(model, [{"role": "user", "content": "hi"}])


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadModelFolder, match=r"tokenizer\.json: no such file.*no tokenizer"):
        TextModel.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a valid tokenizer"),
        (b"{", "not a valid tokenizer"),
        (b"[]", "not a valid tokenizer"),
        (b'{"model": {"type": "BPE"}}', "not a valid tokenizer"),
        (b"\xff\xfe", "not a valid tokenizer"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
    ],
)
def test_a_corrupt_tokenizer_file_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadModelFolder, match=rf"tokenizer\.json: .*{says}"):
        TextModel.load(tmp_path)


def test_a_corrupt_tokenizer_configuration_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", byte_level(), None)
    (tmp_path / "m" / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadModelFolder, match=r"tokenizer_config\.json: not valid JSON"):
        TextModel.load(tmp_path / "m")


def test_a_folder_with_older_files_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_here(monkeypatch)
    tokenizer = byte_level()
    written = json.loads(tokenizer.to_str())["model"]
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(written["vocab"]))
    merges = [" ".join(m) if isinstance(m, list) else m for m in written["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    model = TextModel.load(folder)
    assert asked == [folder]
    text = "water flows 😀"
    assert model.tokenizer.decode(ids_of(model.encode(text, False))) == text


def test_code_in_the_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_here(monkeypatch)
    folder = write_folder(
        tmp_path / "m", byte_level(), None, auto_map={"AutoTokenizer": ["tokenizer.T", None]}
    )
    (folder / "tokenizer.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    TextModel.load(folder)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(BadModelFolder):
        TextModel.load(folder)
    assert asked == [folder] and not (tmp_path / "ran").exists()


def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    script = (
        "import sys; from pathlib import Path;"
        "from penstock.services.tokenizer.choice_stream import ChoiceStream;"
        "from penstock.services.tokenizer.preparation import prepare;"
        "from penstock.services.tokenizer.text_model import TextModel;"
        f"TextModel.load(Path({str(folder)!r}));"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("text", ["a", "e\u0301", "hello <|im_end|> "])
def test_other_threads_run_on_while_a_long_text_is_encoded(text: str, tmp_path: Path) -> None:
    model = load(tmp_path, "byte_level", CHATML)
    prompt = PromptText(text * (400_000 // len(text)))
    turns = 0
    with ThreadPoolExecutor(1) as threads:
        encoding = threads.submit(model.encode_prompt, prompt)
        while not encoding.done():
            time.sleep(0.001)
            turns += 1
    assert len(encoding.result()) > 0
    assert turns > 20  # one or two, where Python's lock is kept


TEXTS = ["a", "^", " ", "水", "👩\u200d👧", "e\u0301", "7", "אב", "\n"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        pytest.param(text, kind, marks=pytest.mark.slow if (place + number) % 3 else ())
        for place, text in enumerate(TEXTS)
        for number, kind in enumerate(KINDS)
    ],
)
def test_a_text_much_too_long_is_refused_by_its_beginning(
    kind: str, text: str, tmp_path: Path
) -> None:
    model = load(tmp_path, kind, CHATML)
    long = text * (4_000_000 // len(text))
    for prompt in (
        PromptText(long),
        Chat(json.dumps([{"role": "user", "content": long}]).encode()),
    ):
        began = time.process_time()
        try:
            with pytest.raises(PromptError, match="context length is 1000 tokens"):
                model.encode_prompt(prompt, 1000)
        finally:
            assert time.process_time() - began < 4.0  # less than a tenth on a free machine


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_fits_is_encoded_as_ever_however_long_its_tokens_are(
    kind: str, tmp_path: Path
) -> None:
    model = load(tmp_path, kind, CHATML)
    for text in ("a" * 3000, "hello world " * 300, " " * 3000, "👩\u200d👧" * 500, "e\u0301" * 900):
        ids = model.encode_prompt(PromptText(text))
        assert model.encode_prompt(PromptText(text), len(ids) // 4) == ids


def test_several_threads_encode_and_render_at_once(tmp_path: Path) -> None:
    model = load(tmp_path, "byte_level", CHATML)
    messages = [[{"role": "user", "content": f"{n} <|im_end|> " * (n % 7)}] for n in range(60)]
    expected = [chat(model, m) for m in messages]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda m: chat(model, m), messages)) == expected


def test_a_response_template_of_the_folder_says_how_outputs_are_read(tmp_path: Path) -> None:
    call = {"type": "function", "function": "{content}"}
    spec: dict[str, Any] = {
        "fields": {
            "thinking": {"open": "<hm>", "close": "</hm>"},
            "tool_calls": {"open": "<c>", "close": "</c>", "content": "json", "transform": call},
            "content": {},
        }
    }
    knows_tools = CHATML + "{% if tools %}{{ tools | tojson }}{% endif %}"
    folder = write_folder(tmp_path / "m", byte_level(), knows_tools, response_template=spec)
    model = TextModel.load(folder)
    asked = msgspec.json.encode([{"type": "function", "function": {"name": "now"}}])
    reading = reading_of(model, OutputFormat(asked), b"", skips_special=True)
    assert reading is not None
    stream = ParsedStream(model, SamplingParams(), b"", reading, reading.parser(1, 0))
    output = '<hm>So.</hm><c>{"name": "now", "arguments": {}}</c>'
    tokens = array("i", ids_of(model.encode_prompt(PromptText(output, False))))
    events = joined(stream.push(tokens).content, stream.finish())
    assert not isinstance(events, str)
    assert "".join(one.text for one in events if isinstance(one, Reasoning)) == "So."
    assert [one.name for one in events if isinstance(one, ToolCallOpened)] == ["now"]
    assert TextModel.load(folder, parsers=("hermes", "auto")).form.family.name == "json_tags"


@pytest.mark.parametrize("spec", [[], "x", 1, {}, {"fields": {"content": {"open_pattern": "("}}}])
def test_a_response_template_that_cannot_be_read_is_told_and_left_out(
    spec: object, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "m", byte_level(), CHATML, response_template=spec)
    form = TextModel.load(folder).form
    assert form.family.name != "response_template"
    assert "response_template is not read" in form.describe()
