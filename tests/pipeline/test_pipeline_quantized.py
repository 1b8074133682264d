"""A server of a model whose weights are rounded while it starts."""

from __future__ import annotations

from pathlib import Path

from reference_models import write_model
from served import served


def test_answers_come_from_rounded_weights_and_the_log_says_so(tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path / "model")
    body = {
        "prompt": [5, 9, 200, 31], "max_tokens": 8, "temperature": 0, "ignore_eos": True,
        "logprobs": 1,
    }  # fmt: skip
    chosen = {}
    for kind in ("none", "int8"):
        flags = ("--device", "cpu", "--dtype", "float32", "--quantization", kind)
        with served(str(folder), *flags, "--num-kv-blocks", "64") as server:
            status, answer = server.post("/v1/completions", body)
            assert status == 200, answer
            assert answer["usage"]["completion_tokens"] == 8
            chosen[kind] = answer["choices"][0]["logprobs"]["token_logprobs"][0]
            said = "in float32, quantized (int8, quantized while it is read)" in server.output
            assert said == (kind == "int8")
    assert chosen["none"] != chosen["int8"]
    assert abs(chosen["none"] - chosen["int8"]) < 0.2
