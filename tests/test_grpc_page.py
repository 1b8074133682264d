"""The client that docs/grpc.md shows works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from grpc_client import address_of
from served import served

PAGE = (Path(__file__).resolve().parent.parent / "docs/grpc.md").read_text()


def test_the_client_of_the_page_prints_an_answer_and_its_usage(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) <= 21
    with served(
        "--device", "null", "--grpc-port", "0", environment={"PENSTOCK_API_KEY": '["KEY"]'}
    ) as server:
        for key, said in (
            ("KEY", r".*\S.*\n\d+ tokens\n"),
            ("other", "UNAUTHENTICATED The API key"),
        ):
            text = code.replace("127.0.0.1:50051", address_of(server)).replace('"KEY"', f'"{key}"')
            done = subprocess.run(
                [sys.executable, "-c", text], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            assert re.match(said, done.stdout, re.DOTALL), done.stdout
