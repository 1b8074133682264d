"""Sessions of agents at transformers' own server: another program's account of the same load."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from penstock.loadtest.client import bench_serve
from penstock.loadtest.client.prompts import WORDS
from penstock.loadtest.models.make_model import make_model
from penstock.loadtest.models.model_sizes import SIZES
from penstock.loadtest.studies.compare_cpu_http import transformers_server

pytest.importorskip("fastapi", reason="`pip install 'transformers[serving]'` brings the server")
pytest.importorskip("accelerate", reason="transformers' server puts a model on a device with it")

pytestmark = pytest.mark.slow
TURNS, TOKENS = 33, 4


def test_agent_sessions_at_transformers_server_are_as_long_as_they_are_to_be(
    tmp_path: Path,
) -> None:
    shape = SIZES["tiny"] | {"max_position_embeddings": 4096}
    model = make_model(tmp_path / "model", dtype="bfloat16", **shape)
    for file in ("config.json", "generation_config.json"):  # it does not know ignore_eos
        fields = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps(fields | {"eos_token_id": None}))
    path = tmp_path / "result.json"
    with transformers_server(Path(sys.executable), model, 1, tmp_path / "log") as server:
        assert server.process is not None
        server.process.send_signal(signal.SIGCONT)  # it waits stopped
        code = bench_serve.main(
            [
                "--base-url", server.url, "--model", server.model, "--ready-timeout", "60",
                "--dataset-name", "agent", "--num-prompts", "1", "--random-format", "text",
                "--random-output-len", str(TOKENS), "--temperature", "0", "--quiet",
                "--save-detailed", "--save-result", str(path),
            ]
        )  # fmt: skip
    result = json.loads(path.read_text())
    assert code == 0
    assert (result["completed"], result["failed"]) == (TURNS, 0)
    assert result["output_lens"] == [TOKENS] * TURNS
    lengths = result["input_lens"]
    assert lengths == sorted(lengths)
    words = Tokenizer.from_file(str(model / "tokenizer.json")).encode(" ".join(WORDS))
    expected = 131 * TOKENS * TURNS * len(words.ids) / len(WORDS)
    assert sum(lengths) == pytest.approx(expected, rel=0.1)
