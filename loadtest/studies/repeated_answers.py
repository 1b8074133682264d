"""Whether the same requests get the same answers, whatever the server does beside them.

    python -m penstock.loadtest.studies.repeated_answers MODEL --device cuda --load-format dummy

Random prompts with seeds, some with top-p and top-k, asked of the library again and again: alone,
in batches of several sizes, from cached prefixes, by an engine with other steps, and while its
worker and its scheduler are killed. Tokens and their logprobs, which no rounding hides, are
compared with those of the first time. ``--no-deterministic`` shows how often they differ else.

Exit codes: 0, 1 some answer differed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.loadtest.offline.offline_requests import draw_requests, moved
from penstock.loadtest.options import integer, length_range, number
from penstock.protocol.model_info import read_model_info

Answer = list[tuple[int, float]]
"""Tokens, and the logprob of each."""
BATCHES, FEW = (256, 64, 8), (2, 1)
_ROLES = ("worker", "scheduler")


class Subject:
    """Requests, and what they were answered the first time."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        drawn = draw_requests(
            parsed.num_prompts, parsed.input_len, (parsed.output_len, parsed.output_len), 0
        )
        self._prompts = moved(drawn.prompts, 0, read_model_info(parsed.model).vocab_size)
        self._params = [
            SamplingParams(
                temperature=parsed.temperature, top_p=(1.0, 0.9)[place % 2],
                top_k=(0, 0, 50)[place % 3], seed=place, logprobs=0, ignore_eos=True,
                max_tokens=parsed.output_len,
            )
            for place in range(len(drawn.prompts))
        ]  # fmt: skip
        self._first: list[Answer] = []
        self.same = True

    def ask(self, llm: LLM, what: str, batch: int, count: int | None = None) -> None:
        """All requests, or the first ``count``, at most ``batch`` of them at once."""
        asked = self._prompts[:count]
        began = time.perf_counter()
        found = llm.generate(asked, self._params[:count], progress=False, max_concurrency=batch)
        seconds = time.perf_counter() - began
        answers = [_answer(one.outputs[0]) for one in found]
        self._first = self._first or answers
        wanted = self._first[: len(answers)]
        differ = [place for place, one in enumerate(answers) if one != wanted[place]]
        tokens = sum(
            [token for token, _ in answers[place]] != [token for token, _ in wanted[place]]
            for place in differ
        )
        self.same = self.same and not differ
        told = f"{len(differ)} differ, {tokens} of them in tokens" if differ else "all the same"
        print(f"{what}: {len(answers)} answers, {told} ({seconds:.1f} s)", flush=True)


def _answer(output: object) -> Answer:
    ids, logprobs = output.token_ids, output.logprobs  # type: ignore[attr-defined]
    return [(token, one[token].logprob) for token, one in zip(ids, logprobs, strict=True)]


def _children(parent: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            yield int(entry.name)


def _processes(role: str) -> list[int]:
    """Of the library's servers that this process has started."""
    found = []
    for server in _children(os.getpid()):
        for pid in _children(server):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split()
            if role.encode() in words:
                found.append(pid)
    return found


def _while_killed(ask: Callable[[], None], after_s: float) -> None:
    """Kill the worker and, as long again later, the scheduler, while ``ask`` waits for answers."""

    def kill() -> None:
        for role in _ROLES:
            time.sleep(after_s)
            for pid in _processes(role):
                print(f"kill -9 of the {role}", flush=True)
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    ask()
    killer.join()


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    subject = Subject(parsed)
    settings = {
        "model": parsed.model, "device": parsed.device, "load_format": parsed.load_format,
        "deterministic": parsed.deterministic, "dtype": parsed.dtype, "max_num_seqs": 256,
        "kv_cache_memory_bytes": parsed.kv_cache_memory_bytes,
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None}
    with LLM(**given) as llm:
        for batch in BATCHES:
            subject.ask(llm, f"batches of {batch}, cached prefixes", batch)
        for batch in FEW:
            subject.ask(llm, "alone" if batch == 1 else f"batches of {batch}", batch, parsed.alone)
        if parsed.kill_after_s:
            _while_killed(
                lambda: subject.ask(llm, "worker and scheduler killed", 32), parsed.kill_after_s
            )
    given |= {"max_num_seqs": 48, "max_num_batched_tokens": 300, "enable_prefix_caching": False}
    with LLM(**given) as llm:
        subject.ask(llm, "another engine: small steps, nothing cached", 256)
    return 0 if subject.same else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument(
        "--deterministic", action=argparse.BooleanOptionalAction, default=True,
        help="as the engine's flag",
    )  # fmt: skip
    parser.add_argument("--kv-cache-memory-bytes", type=integer(1, 2**60), metavar="N")
    parser.add_argument("--num-prompts", type=integer(1, 100_000), default=200, metavar="N")
    parser.add_argument("--input-len", type=length_range, default=(20, 600), metavar="LOW:HIGH")
    parser.add_argument("--output-len", type=integer(1, 100_000), default=64, metavar="N")
    parser.add_argument("--temperature", type=number(0, 100), default=1.0, metavar="X")
    parser.add_argument(
        "--alone", type=integer(1, 100_000), default=40, metavar="N",
        help="so many are asked in pairs and one after the other, too",
    )  # fmt: skip
    parser.add_argument(
        "--kill-after-s", type=number(0, 3600), default=1.0, metavar="X",
        help="kill the worker so long after the last batch has begun, and then the scheduler; 0: "
        "nothing is killed",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
