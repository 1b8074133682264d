"""What must be settled before any test module is imported."""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from _pytest.reports import TestReport
from _pytest.runner import runtestprotocol

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported,
    # which torch and transformers may do at any moment, and whenever a kernel is declared.
    os.environ["TRITON_INTERPRET"] = "1"

# Settings of whoever runs the tests are none of the servers and commands under test.
for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
    del os.environ[name]

# jsonschema would make a parser of IRIs, which takes each test process seconds. No schema of
# the tests names that format.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# What is imported and collected stays. A collection of garbage that looks through all of it takes a
# good part of a second, and a test that makes many objects has many of them.
gc.disable()


SHARING = {
    "security": ["security/test_security_*.py"],
    "commands": ["services/commands/test_*.py"],
    "the library": ["services/library/test_*.py"],
    "a tiny server whose processes die": [
        "chaos/test_chaos_connecting.py",
        "chaos/test_chaos_matrix.py",
    ],
    "the built-in model": [
        "test_docs_requests.py",
        "test_grpc_page.py",
        "pipeline/test_pipeline_tools.py",
        "pipeline/test_pipeline_grpc.py",
        "pipeline/test_pipeline_grpc_engine.py",
        "pipeline/test_pipeline_openai_sdk.py",
        "pipeline/test_pipeline_playground_tools.py",
        "conformance/test_json_schema_served.py",
    ],
    "a small model": [
        "pipeline/test_pipeline_beams.py",
        "pipeline/test_pipeline_deterministic.py",
        "pipeline/test_pipeline_logprobs.py",
        "pipeline/test_pipeline_parameters.py",
        "pipeline/test_pipeline_prompt_caching.py",
        "pipeline/test_pipeline_samplers.py",
        "pipeline/test_pipeline_structured.py",
    ],
    "vectors": [
        "pipeline/test_pipeline_embeddings.py",
        "pipeline/test_pipeline_grpc_embed.py",
    ],
    "the null device": [
        "pipeline/test_pipeline_deterministic_refused.py",
        "pipeline/test_pipeline_scaling.py",
        "pipeline/test_pipeline_playground.py",
        "pipeline/test_pipeline_playground_chats.py",
        "pipeline/test_pipeline_playground_markdown.py",
        "pipeline/test_pipeline_socket_drain.py",
        "deploy/test_dashboards.py",
        "loadtest/test_loadtest_foreign.py",
        "loadtest/test_loadtest_modes.py",
        "loadtest/test_loadtest_own_server.py",
        "loadtest/test_loadtest_random_load.py",
        "loadtest/test_loadtest_trace.py",
    ],
}
"""Files whose tests ask one server: they run in one process, one after the other."""


_group = ExitStack()


@pytest.fixture(scope="session")
def group() -> Iterator[ExitStack]:
    """What is entered here ends with the last test of the files that share it: a server that waits
    for nobody takes a fiftieth of a processor."""
    with _group:
        yield _group


@pytest.fixture(scope="session")
def shared_server(group: ExitStack) -> Any:
    """Called with flags of ``serve``: a running server, which other files may have asked before."""
    from support.pipeline.served import SharedServers

    return SharedServers(group)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights."""
    from penstock.loadtest.models.make_model import make_model

    folder: Path = make_model(tmp_path_factory.mktemp("models") / "small", hidden_size=32)
    return folder


TOLD_FROM_S = 0.5


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A process of many tells of a test when it has ended, in one message: that it begins, was set
    up and torn down are three more, and with thousands of tests they take the process that hears
    them, and those that write them, half a minute. What fails or takes long is told."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed or report.duration > TOLD_FROM_S:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A group's servers end with it, and a browser before a test that has no use for it."""
    if nextitem is not None and group_of(nextitem.nodeid) != group_of(item.nodeid):
        _group.close()
    opened = sys.modules.get("support.pipeline.browser")
    if opened is not None and "browser" not in getattr(nextitem, "fixturenames", ()):
        opened.close_shared_chromium()


def group_of(nodeid: str) -> str:
    """What one process runs: a file, or files that share a server."""
    return group_of_file(nodeid.partition("::")[0])


@functools.cache
def group_of_file(file: str) -> str:
    for name, patterns in SHARING.items():
        if any(PurePosixPath(file).match(pattern) for pattern in patterns):
            return name
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``--dist loadfile``."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which every test has a mark that this run leaves out is not imported: those of
    SDKs, GPUs and long runs take seconds in each test process."""
    left_out = set(re.findall(r"not (\w+)", config.option.markexpr))
    if not left_out or " or " in config.option.markexpr or not _is_tests(collection_path):
        return None
    return True if left_out & marks_of_all(collection_path.read_text("utf-8")) else None


def _is_tests(path: Path) -> bool:
    return path.name.startswith("test_") and path.suffix == ".py"


def marks_of_all(source: str) -> set[str]:
    """The plain marks that a module's ``pytestmark`` gives each of its tests."""
    found = re.search(r"^pytestmark = (\[[^\]]*\]|.*)", source, re.MULTILINE)
    return set(re.findall(r"pytest\.mark\.(\w+)(?=[,\]\s]|$)", found[1])) if found else set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of this folder and the simulation first: a long one that comes last keeps one process
    busy alone."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent not in (here, here / "simulation"))
    groups = {name: number for number, name in enumerate(SHARING)}
    items.sort(key=lambda item: groups.get(group_of(item.nodeid), len(groups)))


def pytest_collection_finish() -> None:
    """One thread for torch: two in each of two test processes wait for each other, and what takes
    16 seconds alone then takes 90."""
    gc.freeze()
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        from support.lean_interpreter import make_lean

        make_lean(interpreter)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Of tests that were skipped for want of a program, how many; nobody looks for an ``s``."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report, TestReport) and isinstance(report.longrepr, tuple)
    )
    missing = {reason: count for reason, count in reasons.items() if "apt-get" in reason}
    if missing:
        terminalreporter.section("NOT TESTED", sep="!", red=True, bold=True)
        for reason, count in missing.items():
            terminalreporter.line(f"{count} tests were skipped: {reason}", red=True)
