"""The adapters of a server that administrators load and unload: which may be loaded, and which ones
workers have that are started from now on."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.adapters import adapter_limits, taken_names, unfit_name
from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.administration import (
    ADMIT_ADAPTER,
    FORGET_ADAPTER,
    KEEP_ADAPTER,
    AdapterAnswer,
    AdapterPlace,
    Ask,
    Told,
)
from penstock.services.launcher.model_folder import FolderRefused, find_folder
from penstock.services.launcher.processes import Child

_QUESTIONS = (ADMIT_ADAPTER, KEEP_ADAPTER, FORGET_ADAPTER)


class AdapterSet:
    """Those of the one model that a server is started with."""

    def __init__(self, configs: Sequence[Config], workers: Sequence[Child]) -> None:
        """Raises ``ConfigError`` for a folder of ``--lora-dirs`` that is not there. Only at the
        start: one that is gone later must not keep a process from starting again."""
        config = configs[0]
        self._dirs, self._several = config.launch.lora_dirs, len(configs) > 1
        for folder in self._dirs:
            if not os.path.isdir(os.path.expanduser(folder)):
                raise ConfigError(f"--lora-dirs {folder}: there is no such folder")
        self._names = taken_names(config)
        self._workers = workers
        self._most = adapter_limits(config.loading).loaded
        self._kept = dict(one.split("=", 1) for one in config.loading.lora)
        """Folder of each adapter, by its name."""
        self._before: dict[str, tuple[str, str]] = {}
        """Name → (which load of it was the latest, the folder that it had before)."""

    def answer(self, asked: Ask) -> Told | None:
        """The answer to a frontend; ``None``: it asks something else."""
        if asked.what not in _QUESTIONS:
            return None
        try:
            place = msgspec.msgpack.decode(asked.about, type=AdapterPlace)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            answer = AdapterAnswer("", 400, "bad_question", str(error))
        else:
            answer = self._admit(place)
            if answer.status == 200 and asked.what != ADMIT_ADAPTER:
                answer = self._change(place, keep=asked.what == KEEP_ADAPTER)
        return Told(asked.number, msgspec.msgpack.encode(answer))

    def _admit(self, place: AdapterPlace) -> AdapterAnswer:
        if not self._dirs:
            return AdapterAnswer(
                "",
                403,
                "adapter_loading_off",
                "this server was started without --lora-dirs, the folders below which adapters may "
                "be loaded, so adapters can be neither loaded nor unloaded",
            )
        if reason := unfit_name(place.name):
            return AdapterAnswer("", 400, "bad_name", f"lora_name: {reason}")
        if place.name in self._names:
            reason = f"there is a model {show(place.name)}; give the adapter another lora_name"
            return AdapterAnswer("", 409, "model_exists", reason)
        if not place.folder:
            return AdapterAnswer()
        try:
            folder = find_folder(place.folder, self._dirs, "--lora-dirs")
        except FolderRefused as refusal:
            reason = f"lora_path is {show(place.folder)}: {refusal}"
            return AdapterAnswer("", refusal.status, "adapter_folder_refused", reason)
        if place.name not in self._kept and len(self._kept) >= self._most:
            reason = (
                f"{self._most} adapters are loaded, as --max-registered-loras (unless it is given, "
                "--max-cpu-loras or --max-loras) allows; unload one first"
            )
            return AdapterAnswer("", 400, "too_many_adapters", reason)
        return AdapterAnswer(str(folder))

    def _change(self, place: AdapterPlace, *, keep: bool) -> AdapterAnswer:
        """Returns the folder that the adapter had before."""
        former = self._kept.pop(place.name, "")
        load, before = self._before.pop(place.name, ("", ""))
        if keep:
            self._kept[place.name] = place.folder
            self._before[place.name] = place.load, former
        elif place.load and (restored := before if place.load == load else former):
            self._kept[place.name] = restored
        lora = [f"{name}={folder}" for name, folder in self._kept.items()]
        for worker in self._workers:
            worker.change_environment("PENSTOCK_LORA", msgspec.json.encode(lora).decode())
        require_none(self._workers)
        return AdapterAnswer(former)


def require_none(children: Sequence[Child]) -> None:
    """From their next start on, workers load what can be loaded of ``--lora`` and log the rest:
    once a server was ready, a folder that is gone must not end it."""
    for child in children:
        if child.service == "worker":
            child.change_environment("PENSTOCK_LORA_REQUIRED", "false")
