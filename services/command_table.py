"""All commands of ``penstock``: what each is for, and the flags that it takes."""

from __future__ import annotations

import argparse
import importlib

import msgspec

from penstock.protocol.config.flags import FlagParser, build_parser

OPTIONAL_MODEL = "Without MODEL it serves penstock-demo, the small built-in model."


class Command(msgspec.Struct, frozen=True):
    """One subcommand."""

    summary: str
    groups: tuple[str, ...]
    """The groups of settings that it reads."""
    takes_model: bool = False


COMMANDS = {
    "serve": Command(
        "start a whole server and watch over it",
        (
            "model", "cache", "scheduler", "speculation", "admission", "device", "loading",
            "server", "cluster", "launch", "observability", "test",
        ),
        takes_model=True,
    ),
    "router": Command(
        "who is alive, and which process a new request goes to",
        ("admission", "cluster", "process", "observability", "test"),
    ),
    "tokenizer": Command(
        "text to tokens and tokens to text",
        ("model", "cluster", "process", "launch", "observability", "test"),
        takes_model=True,
    ),
    "scheduler": Command(
        "queue, KV blocks and step plans of one engine",
        (
            "model", "cache", "scheduler", "admission", "cluster", "process", "launch",
            "observability", "test",
        ),
        takes_model=True,
    ),
    "worker": Command(
        "one device: weights, KV memory, kernels",
        (
            "model", "cache", "scheduler", "speculation", "device", "loading", "cluster", "process",
            "launch", "observability", "test",
        ),
        takes_model=True,
    ),
    "keeper": Command(
        "KV blocks in shared memory and on disk",
        ("cache", "cluster", "process", "launch", "observability", "test"),
    ),
    "holder": Command(
        "the memory of loaded weights, for workers to come",
        ("cluster", "process", "launch", "observability", "test"),
    ),
    "frontend": Command(
        "the APIs for clients: HTTP, WebSockets, gRPC",
        ("admission", "server", "cluster", "process", "launch", "observability", "test"),
    ),
}  # fmt: skip


class Tool(msgspec.Struct, frozen=True):
    """A command that is no process of a server."""

    summary: str
    module: str = ""
    """Its ``main`` takes the arguments, and in ``services/commands`` the environment too."""


TOOLS = {
    "version": Tool("print the version"),
    "chat": Tool("talk to a model, on a server or in a folder", "services.commands.chat"),
    "complete": Tool("continue a text", "services.commands.complete"),
    "embed": Tool("make embeddings of texts", "services.commands.embed"),
    "models": Tool("list what a server serves", "services.commands.models"),
    "keys": Tool("make, list and take back keys of a server's clients", "services.commands.keys"),
    "status": Tool("processes, queues and rates of a running server", "services.commands.status"),
    "doctor": Tool(
        "what this machine has, and what would keep a server from working",
        "services.commands.doctor",
    ),
    "stop": Tool("end a server of yours on this host", "services.commands.stop"),
    "completion": Tool(
        "print a script that completes commands in a shell", "services.commands.completion"
    ),
    "pull": Tool("fetch a model from the Hugging Face hub", "services.commands.pull"),
    "list": Tool("models on this disk, and which can be served", "services.commands.list"),
    "rm": Tool("remove a model from this disk", "services.commands.rm"),
    "plan": Tool("how a model fits on a device or on several, and how fast"),
    "tune": Tool("measure this machine, and write the settings that suit it", "loadtest.tune"),
    "warm": Tool("compile a model's kernels ahead of its first start"),
    "bench": Tool("measure a server or the library", "loadtest.bench"),
    "eval": Tool(
        "ask a server held-out questions: the accuracy of each skill", "loadtest.evaluation.eval"
    ),
    "trace": Tool(
        "what each process of a running server does, on one timeline", "loadtest.recordings.trace"
    ),
}
MODEL_COMMANDS = ("plan", "warm")
"""They take the flags of ``serve``."""

HEADINGS = {
    "Run a server": ("serve", "plan", "tune", "warm"),
    "Use one": ("chat", "complete", "embed", "models"),
    "Look after one": ("status", "doctor", "stop", "keys", "trace"),
    "Models on this disk": ("pull", "list", "rm"),
    "Measure": ("bench", "eval"),
    "Run one process of a server": (
        "router", "tokenizer", "scheduler", "worker", "keeper", "holder", "frontend",
    ),
    "About this program": ("completion", "version"),
}  # fmt: skip
"""Each command once, as the help shows them."""


def listed() -> str:
    """All commands under their headings."""
    summaries = {name: command.summary for name, command in (COMMANDS | TOOLS).items()}
    width = max(map(len, summaries)) + 2
    parts = []
    for heading, names in HEADINGS.items():
        parts += [f"{heading}:", *(f"  {name:{width}}{summaries[name]}" for name in names)]
    return "\n".join(parts)


def parser_of(name: str) -> argparse.ArgumentParser | None:
    """What reads the flags of a command; ``None``: it takes none, or has commands of its own."""
    if name in COMMANDS:
        return service_parser(name)
    if name in MODEL_COMMANDS:
        from penstock.services import model_commands

        return model_commands.parser(name)
    module = TOOLS[name].module
    if not module:
        return None
    found: argparse.ArgumentParser | None = importlib.import_module(f"penstock.{module}").parser()
    return found


def service_parser(name: str) -> FlagParser:
    command = COMMANDS[name]
    description = command.summary[0].upper() + command.summary[1:] + "."
    if command.takes_model:
        description += " " + OPTIONAL_MODEL
    return build_parser(
        f"penstock {name}",
        description,
        command.groups,
        positional_model=command.takes_model,
        several_models=name == "serve",
    )
