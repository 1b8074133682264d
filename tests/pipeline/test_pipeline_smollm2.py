"""A real instruct model through a whole server on the CPU: it answers as transformers does.

The folder is SmolLM2-135M-Instruct (Llama family, heads of 64, three query heads to one of keys).
``SMOLLM2_FOLDER`` names it; without that the tests are skipped. See CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.evaluation import eval as evaluation
from penstock.loadtest.own_server import own_server

FOLDER = os.environ.get("SMOLLM2_FOLDER", "")
ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 48
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [{"role": "user", "content": "Write a Python function that reverses a list."}],
    [
        {"role": "user", "content": "My name is Ada. Remember it."},
        {"role": "assistant", "content": "I will, Ada."},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Translate into German: naïve café, 水, 😀 — good morning!"}],
    [{"role": "user", "content": f"Sum this up:\n\n{PAGE[:1500]}"}],
    [{"role": "user", "content": f"What is this about?\n\n{PAGE[:5000]}"}],
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # two models of 135 M in float32: minutes on cores that others use
    pytest.mark.skipif(
        not Path(FOLDER, "config.json").is_file() or not FOLDER,
        reason="SMOLLM2_FOLDER names no folder with SmolLM2-135M-Instruct",
    ),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_server([FOLDER, "--device", "cpu", "--dtype", "float32"]) as url:
        yield url


def answered(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": "", "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0,
            "logprobs": True}  # fmt: skip
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        body["model"] = json.load(answer)["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    return choice


def test_eight_chats_are_answered_as_transformers_does_token_for_token(url: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    choices = [answered(url, messages) for messages in CHATS]
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    for messages, choice in zip(CHATS, choices, strict=True):
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        whole = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
        ids = whole[0, prompt["input_ids"].shape[1] :].tolist()
        assert choice["message"]["content"] == tokenizer.decode(ids, skip_special_tokens=True)
        ended = ids[-1] == tokenizer.eos_token_id
        assert choice["finish_reason"] == ("stop" if ended else "length")
        said = [bytes(each["bytes"]) for each in choice["logprobs"]["content"]]
        pieces = [_bytes(tokenizer, token) for token in ids]
        assert said == pieces[: len(said)]
        assert len(said) >= len(ids) - ended


def _bytes(tokenizer: Any, token: int) -> bytes:
    """Of one token of a byte-level vocabulary, by GPT-2's alphabet of bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    text = tokenizer.convert_ids_to_tokens(token)
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    return text.encode() if text in tokenizer.all_special_tokens else bytes(map(byte_of.get, text))


def test_the_facts_and_the_perplexity_are_those_of_transformers(url: str, tmp_path: Path) -> None:
    text, figures = tmp_path / "text", tmp_path / "eval.json"
    text.write_text(PAGE[:4000], encoding="utf-8")
    flags = ["--base-url", url, "--set", "facts", "--text", str(text), "--quiet"]
    flags += ["--reference", FOLDER, "--output-json", str(figures)]
    assert evaluation.main(flags) == 0
    result = json.loads(figures.read_text())
    assert result["asked"] > 100
    assert result["differences"] == []
    assert 1 < result["perplexity"] < 100
