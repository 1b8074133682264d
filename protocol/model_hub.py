"""Models that are named as on the Hugging Face hub: ``Qwen/Qwen3-0.6B``.

A name becomes a folder before any process starts: that of the newest snapshot in the hub's local
cache (``HF_HUB_CACHE``, below ``HF_HOME``), where nothing is asked of the network; else it is
downloaded into that cache. Formats that can run code are never fetched.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec

from penstock.protocol.config import Config
from penstock.protocol.conversion import model_command
from penstock.protocol.model_info import BadModelFolder, no_gguf

ASK_SECONDS = 5.0
"""How long the hub may take to say what a repository holds."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_WEIGHTS = "*.safetensors"
_TEXTS = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Settings, tokenizer and chat template; ``*.model`` is SentencePiece's."""
_IGNORED = ["*/*", "consolidated*"]
"""Other formats and the publisher's own copy of the weights."""
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def is_hub_name(model: str) -> bool:
    """Whether ``model`` is written ``ORG/NAME`` and is nothing on this disk."""
    return _NAME.fullmatch(model) is not None and not os.path.exists(model)


def find_model(name: str, config: Config, *, only_look: bool = False) -> Path:
    """The folder of the hub's model ``name``, with what ``config`` needs of it.

    ``only_look``: in the local cache. A download says so on standard error, and shows its progress
    there on a terminal. Raises ``BadModelFolder``, which ends with what to do.
    """
    from huggingface_hub import constants  # 0.3 s, for who names a folder in vain

    weights = config.loading.load_format != "dummy" and config.device.device != "null"
    wanted = [*_TEXTS, *([_WEIGHTS] if weights else [])]
    folder, missing = _cached(name, wanted, weights)
    if folder is not None and not missing:
        return folder
    cache = constants.HF_HUB_CACHE
    lack = f"{name}: no such folder, and not in the hub's cache {cache}"
    if folder is not None:
        lack = f"{name}: in the hub's cache {cache}, but without {', '.join(missing)}"
    if only_look or not config.loading.download:
        raise _failed(lack, "--no-download forbids fetching it here; fetch it with", name)
    if constants.HF_HUB_OFFLINE:
        raise _failed(lack, "HF_HUB_OFFLINE forbids fetching it; unset that, then", name)
    try:
        return _download(name, wanted, weights)
    except BadModelFolder:
        raise
    except Exception as error:  # whatever the hub's client and its HTTP library raise
        raise _failed(lack, _reason(name, error), name) from None


def fetch_model(name: str) -> Path:
    """Ask the hub for the newest version of the model ``name``, and fetch what is not in the local
    cache yet. Says and raises what ``find_model`` does."""
    from huggingface_hub import constants

    if not is_hub_name(name):
        raise BadModelFolder(f"{name}: expected a name on the hub, ORG/NAME")
    if constants.HF_HUB_OFFLINE:
        raise BadModelFolder(f"{name}: HF_HUB_OFFLINE forbids fetching it; unset that")
    try:
        return _download(name, [*_TEXTS, _WEIGHTS], weights=True)
    except BadModelFolder:
        raise
    except Exception as error:  # whatever the hub's client and its HTTP library raise
        raise _failed(f"{name} cannot be fetched", _reason(name, error), name) from None


def _failed(lack: str, reason: str, name: str) -> BadModelFolder:
    return BadModelFolder(f"{lack}; {reason}: hf download {name}")


def _cached(name: str, wanted: list[str], weights: bool) -> tuple[Path | None, list[str]]:
    """The newest snapshot in the cache and what it lacks; ``None``: there is no snapshot."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name, local_files_only=True, allow_patterns=wanted, ignore_patterns=_IGNORED
        )
        folder = Path(found)
    except LocalEntryNotFoundError as error:
        # An interrupted download: the snapshot is there, and is looked at as any other.
        begun = getattr(error, "snapshot_path", None)
        if begun is None:
            return None, []
        folder = Path(begun)
    no_gguf(folder)
    return folder, missing_files(folder, weights)


def missing_files(folder: Path, weights: bool) -> list[str]:
    """Files that a model must have and ``folder`` has not, a few of them."""
    gone = [] if (folder / "config.json").exists() else ["config.json"]
    if not any((folder / name).exists() for name in _TOKENIZERS):
        gone.append(_TOKENIZERS[0])
    if weights and not (folder / "model.safetensors").exists():
        if (folder / _INDEX).exists():
            gone += [shard for shard in _shards(folder / _INDEX) if not (folder / shard).exists()]
        else:
            gone.append("model.safetensors")
    return gone if len(gone) <= 3 else [*gone[:3], f"{len(gone) - 3} more"]


def _shards(index: Path) -> list[str]:
    """The files that an index names; none where it cannot be read, which loading says better."""
    try:
        tree: Any = msgspec.json.decode(index.read_bytes())
        return sorted({str(shard) for shard in tree["weight_map"].values()})
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return []


def _download(name: str, wanted: list[str], weights: bool) -> Path:
    """Fetch it; what an interrupted download has fetched already is kept and continued."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    info = HfApi().model_info(name, timeout=ASK_SECONDS, files_metadata=True)
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    _check_formats(name, sizes)
    size = sum(sizes[file] for file in sizes if _matches(file, wanted))
    sys.stderr.write(
        f"penstock: downloading {name} ({size / 1e9:.2f} GB) from {constants.ENDPOINT} to "
        f"{constants.HF_HUB_CACHE}; Ctrl-C may interrupt it, the next start goes on\n"
    )
    if not sys.stderr.isatty():
        disable_progress_bars()
    folder = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=_IGNORED))
    if gone := missing_files(folder, weights):
        raise BadModelFolder(f"{name}: the hub's repository has no {', '.join(gone)}")
    return folder


def _matches(file: str, wanted: list[str]) -> bool:
    """As the hub's client chooses files."""
    return any(fnmatch(file, one) for one in wanted) and not any(
        fnmatch(file, one) for one in _IGNORED
    )


def _check_formats(name: str, files: Iterable[str]) -> None:
    """Check the list of files before gigabytes are fetched. Raises ``BadModelFolder`` where no file
    is safetensors."""
    if any(file.endswith(".safetensors") for file in files):
        return
    if any(file.endswith(".gguf") for file in files):
        whole = re.sub(r"-gguf$", "", name, flags=re.IGNORECASE)
        use = f"for instance {whole}" if whole != name else "usually named without GGUF"
        raise BadModelFolder(
            f"{name}: holds GGUF files, which are not downloaded; use the repository with the "
            f"model's safetensors, {use}"
        )
    raise BadModelFolder(
        f"{name}: holds no safetensors files, and other formats are not read: they can run code; "
        f"if you trust it, convert it, and serve the folder: {model_command(name)}"
    )


def _reason(name: str, error: Exception) -> str:
    """Why a download failed, and what has to be done before it can be tried again."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return (
            f"it is gated: accept its terms at {constants.ENDPOINT}/{name}, log in with "
            "`hf auth login` or HF_TOKEN, then"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{constants.ENDPOINT} shows no model of that name; if it is private, log in with "
            "`hf auth login` or HF_TOKEN, then"
        )
    text = " ".join(str(error).split())[:200]
    failed = f"{constants.ENDPOINT} failed ({type(error).__name__}: {text})"
    return f"{failed}; fetch it where that can be reached, with"
