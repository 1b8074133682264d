"""A server of a model whose weights are rounded while it starts."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from support.pipeline.reference_models import ids_of, write_model
from support.pipeline.served import served

PROMPT = [5, 9, 200, 31]


def test_answers_come_from_rounded_weights_and_the_log_says_so(tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path / "model")
    body = {
        "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1,
    }  # fmt: skip
    flags = ("--device", "cpu", "--dtype", "float32", "--quantization", "int8")
    with served(str(folder), *flags, "--num-kv-blocks", "64") as server:
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        assert "in float32, quantized (int8, quantized while it is read)" in server.output
    assert answer["usage"]["completion_tokens"] == 8
    first = ids_of(answer["choices"][0]["text"])[0]
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = float(exact(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)[first])
    found = answer["choices"][0]["logprobs"]["token_logprobs"][0]
    assert 1e-4 < abs(found - wanted) < 0.2
