"""Who may import what: read from the source, and seen at run time."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("client", "protocol", "services", "kernels", "loadtest", "demo", "penstock")
SERVICES = (
    "frontend",
    "tokenizer",
    "router",
    "scheduler",
    "worker",
    "keeper",
    "holder",
    "launcher",
)
FORBIDDEN = {
    "frontend": {"torch", "transformers", "triton", "llguidance"},
    "tokenizer": {"torch", "triton", "aiohttp"},
    "router": {"torch", "transformers", "aiohttp", "triton", "llguidance"},
    "scheduler": {"torch", "transformers", "aiohttp", "triton", "llguidance"},
    "worker": {"aiohttp"},
    "keeper": {"torch", "transformers", "aiohttp", "triton", "llguidance", "numpy"},
    "holder": {"torch", "transformers", "aiohttp", "triton", "llguidance", "numpy"},
    "launcher": {"torch", "transformers", "aiohttp", "triton", "llguidance"},
}
OWN = {
    "worker": ("penstock.kernels",),
    "frontend": ("penstock.client",),
}
"""What a service may import of ``penstock`` beside ``penstock.protocol`` and itself."""
UNSAFE_MODULES = {
    "pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "zmq.asyncio",
}  # fmt: skip
UNSAFE_CALLS = {"eval", "exec"}

MAY_READ_ENVIRONMENT = (
    "services/cli.py", "services/model_commands.py", "services/launcher/", "protocol/config/",
    "services/library/server_process.py",
)  # fmt: skip


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents if part.is_relative_to(ROOT)):
                yield path.relative_to(ROOT), parsed(path)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def dotted(node: ast.AST) -> str:
    """A name, or names with dots between them, as they are written; else nothing."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=owner, attr=name) if before := dotted(owner):
            return f"{before}.{name}"
    return ""


@functools.cache
def imported(tree: ast.Module, package: str) -> list[str]:
    """Every module that a file imports, with the names taken from it: ``a.b`` and ``a.b.c``."""
    found: list[str] = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*base, module]).rstrip(".")
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


def package_of(path: Path) -> str:
    return "penstock." + ".".join(path.parent.parts)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in packages)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_the_protocol_and_no_other_service(service: str) -> None:
    allowed = ("penstock.protocol", f"penstock.services.{service}", *OWN.get(service, ()))
    for path, tree in sources(f"services/{service}"):
        for module in imported(tree, package_of(path)):
            ours = module.startswith("penstock.") and module != "penstock.__version__"
            assert not ours or within(module, allowed), f"{path} imports {module}"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_never_imports_what_its_process_must_do_without(service: str) -> None:
    for path, tree in sources(f"services/{service}"):
        found = {module.partition(".")[0] for module in imported(tree, package_of(path))}
        assert not found & FORBIDDEN[service], f"{path} imports {found & FORBIDDEN[service]}"


@pytest.mark.parametrize(
    ("folder", "allowed", "heavy"),
    [
        ("protocol", ("penstock.protocol",), {"torch", "transformers", "aiohttp", "triton"}),
        (
            "client",
            ("penstock.protocol", "penstock.client"),
            {"torch", "transformers", "aiohttp", "triton"},
        ),
        ("kernels", ("penstock.kernels",), {"transformers", "aiohttp"}),
    ],
)
def test_what_services_stand_on_imports_no_service_and_nothing_heavy(
    folder: str, allowed: tuple[str, ...], heavy: set[str]
) -> None:
    for path, tree in sources(folder):
        for module in imported(tree, package_of(path)):
            ours = module.startswith("penstock.")
            assert not ours or within(module, allowed), f"{path} imports {module}"
            assert module.partition(".")[0] not in heavy, f"{path} imports {module}"


def test_of_all_services_only_the_frontend_and_the_library_import_the_client() -> None:
    """The command line and the commands among them."""
    for path, tree in sources("services"):
        if not str(path).startswith(("services/frontend/", "services/library/")):
            for module in imported(tree, package_of(path)):
                assert not within(module, ("penstock.client",)), f"{path} imports {module}"


def test_commands_import_of_services_only_the_workers_lists_of_architectures() -> None:
    allowed = (
        "penstock.services.commands",
        "penstock.services.command_table",
        "penstock.services.worker.encoders.families",
        "penstock.services.worker.models.registry",
    )
    for path, tree in sources("services/commands"):
        for module in imported(tree, package_of(path)):
            service = module.startswith("penstock.services.")
            assert not service or within(module, allowed), f"{path} imports {module}"


def test_what_is_shipped_imports_no_study() -> None:
    """They stay in the source tree, so a command of the wheel would not find them."""
    for path, tree in sources(*SHIPPED):
        if not str(path).startswith("loadtest/studies/"):
            found = [name for name in imported(tree, package_of(path)) if ".studies" in name]
            assert not found, f"{path} imports {found}"


def test_kernels_is_a_folder_without_an_init_file() -> None:
    """transformers imports a package of that name when it finds one."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_nothing_that_is_shipped_can_run_code_from_bytes() -> None:
    for path, tree in sources(*SHIPPED):
        for module in imported(tree, package_of(path)):
            assert not within(module, tuple(UNSAFE_MODULES)), f"{path} imports {module}"
        for node in nodes(tree):
            name = dotted(node.func) if isinstance(node, ast.Call) else ""
            assert name not in UNSAFE_CALLS, f"{path}:{getattr(node, 'lineno', 0)} calls {name}()"
            if isinstance(node, ast.Attribute):
                safe = "_pyobj" not in node.attr and node.attr != "send_serialized"
                assert safe, f"{path}:{node.lineno}: {node.attr}"
                assert dotted(node) != "torch.load", f"{path}:{node.lineno}"


def test_only_the_command_line_the_launcher_and_the_configuration_read_the_environment() -> None:
    """Another may set what a library reads later, with ``os.environ.setdefault``."""
    for path, tree in sources("protocol", "services", "kernels"):
        if str(path).startswith(MAY_READ_ENVIRONMENT):
            continue
        setters = {
            node.value
            for node in nodes(tree)
            if isinstance(node, ast.Attribute) and node.attr == "setdefault"
        }
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and node not in setters:
                text = dotted(node)
                assert text not in {"os.environ", "os.getenv"}, f"{path}:{node.lineno} reads {text}"
        for module in imported(tree, package_of(path)):
            assert module not in {"os.environ", "os.getenv"}, f"{path} imports {module}"


def test_llguidance_is_imported_where_it_is_used_and_nowhere_else() -> None:
    """At the head of a file only for its types: frontends, routers and schedulers lack it."""
    users = {
        "protocol/grammar/compiler.py",
        "services/tokenizer/grammar_process.py",
        "services/worker/grammar_prototypes.py",
        "services/worker/grammar_rows.py",
        "services/worker/grammar_slot.py",
        "services/worker/grammar_slots.py",
    }
    for path, tree in sources(*SHIPPED):
        found = [one for one in imported(tree, package_of(path)) if within(one, ("llguidance",))]
        assert not found or str(path) in users, f"{path} imports {found}"
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = imported(ast.Module([node], []), package_of(path))
                assert not any(within(one, ("llguidance",)) for one in names), path


@pytest.mark.parametrize(
    "service", ["frontend", "tokenizer", "router", "scheduler", "keeper", "holder"]
)
def test_a_light_service_starts_without_torch_and_transformers(service: str) -> None:
    """Nor with rich, which structlog imports where it is installed."""
    heavy = FORBIDDEN[service] | {"transformers", "llguidance", "rich"}
    code = (
        f"import sys, penstock.services.{service}.service\n"
        f"print(*sorted({heavy!r} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
SHOW_THE_TIME = {
    "protocol/keys/record.py",
    "services/commands/keys.py",
    "services/frontend/keys/key_table.py",
    "services/frontend/keys/local_limits.py",
    "services/frontend/keys/shared_limits.py",
    "services/frontend/keys/standing.py",
    "protocol/process/console.py",
    "protocol/process/logs.py",
    "protocol/process/metrics.py",
    "protocol/process/service.py",
    "protocol/process/spans.py",
    "protocol/process/stage_export.py",
    "services/frontend/connection.py",
    "services/frontend/context.py",
    "services/frontend/dialect_handler.py",
    "services/frontend/dialects/responses/renderer.py",
    "services/tokenizer/template_sandbox.py",
}
"""Files that tell a user, a client, a template or a monitoring system what time it is, or know when
a key expires."""


def test_no_deadline_hangs_on_a_clock_that_can_be_set() -> None:
    for path, tree in sources("protocol", "services", "kernels"):
        calls = {dotted(node.func) for node in nodes(tree) if isinstance(node, ast.Call)}
        assert not calls & WALL_CLOCK or str(path) in SHOW_THE_TIME, f"{path}: {calls & WALL_CLOCK}"
        assert not WALL_CLOCK & set(imported(tree, package_of(path))), path
