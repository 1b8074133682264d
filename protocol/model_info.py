"""What a checkpoint's JSON files say about the model, read without torch or transformers.

Accepts both layouts that Hugging Face folders use: transformers 4 (``torch_dtype``,
``rope_theta``, ``rope_scaling``) and 5 (``dtype``, ``rope_parameters``).
"""

from __future__ import annotations

import hashlib
import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from penstock.protocol.sampling import DEFAULTS, parse_field
from penstock.protocol.validation import InvalidValue

MAX_JSON_BYTES = 64 * 1024 * 1024
SHARED_FILES = ("config.json", "tokenizer.json", "vocab.json", "tokenizer.model")
"""What the processes of one server must have alike: the shapes, and the meaning of a token id."""
LFS_POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS left in the place of the true one."""
WHAT_MODEL_IS = (
    "MODEL is the path of a Hugging Face checkpoint folder, or for `penstock serve` the name of a "
    "model on the Hugging Face hub (ORG/NAME)"
)


MAX_MESSAGE = 4000
_WITHOUT_LENGTH = ("Mamba", "FalconMamba", "Rwkv", "RWKV", "Bloom", "Falcon", "Mpt", "MPT")
"""How the names of architectures begin that need none."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class BadModelFolder(ValueError):
    """The folder cannot be served. The message names the file and the cause.

    It is one line of bounded length, whatever the folder's files put into it.
    """

    def __init__(self, message: str) -> None:
        line = _CONTROL.sub(" ", message)
        super().__init__(line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "…")


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts that more than one service needs."""

    folder: Path
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: list[int]
    defaults: dict[str, float]
    """Sampling defaults of ``generation_config.json``, for the names in ``sampling.DEFAULTS``."""
    config: dict[str, Any]
    """``config.json`` as it stands."""

    def is_named(self, pattern: re.Pattern[str]) -> bool:
        """Whether that occurs in what its makers called the model, as far as the folder tells: in
        its path, which holds ORG and NAME of what was pulled, or in ``_name_or_path``."""
        parts = (*self.folder.parts, *self.folder.resolve().parts)
        return any(map(pattern.search, (str(self.config.get("_name_or_path", "")), *parts)))


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """A whole file of text, not decoded. Raises ``BadModelFolder`` that names it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadModelFolder(f"{path}: not a regular file")
        if status.st_size > max_bytes:
            raise BadModelFolder(f"{path}: larger than {max_bytes} bytes")
        text = path.read_bytes()
    except FileNotFoundError:
        raise BadModelFolder(f"{path.absolute()}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, BadModelFolder):
            raise
        raise BadModelFolder(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if text.startswith(LFS_POINTER):
        raise BadModelFolder(
            f"{path}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        )
    return text


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises ``BadModelFolder`` that names it."""
    try:
        return msgspec.json.decode(read_text(path))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadModelFolder(f"{path}: not valid JSON: {error}") from None


def _number(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise BadModelFolder(f"{path}: {key} must be a positive integer, got {value!r}")
    return value


def _rows_ahead(config: dict[str, Any], architecture: str) -> int:
    """Rows of the table of positions that stand for none: RoBERTa and its kin begin behind that of
    padding."""
    if not architecture.startswith(("Roberta", "XLMRoberta", "Camembert", "MPNet")):
        return 0
    padding = config.get("pad_token_id", 1)
    return padding + 1 if type(padding) is int and 0 <= padding < 16 else 2


def _sentence_length(folder: Path) -> int:
    """Tokens of a text, as a folder of sentence-transformers says; 0: it does not."""
    path = folder / "sentence_bert_config.json"
    config = read_json(path) if path.is_file() else None
    found = config.get("max_seq_length") if isinstance(config, dict) else None
    return found if type(found) is int and found > 0 else 0


def _longest(config: dict[str, Any], architecture: str, path: Path) -> int:
    """Positions that the model was trained for; older families have names of their own for it."""
    if config.get("max_position_embeddings") is not None:
        rows = _number(config, "max_position_embeddings", path)
        longest = max(rows - _rows_ahead(config, architecture), _extended(config, architecture))
        return min(longest, _sentence_length(path.parent) or longest)
    for key in ("n_positions", "max_seq_len", "seq_length", "n_ctx"):
        if config.get(key) is not None:
            return _number(config, key, path)
    remedy = "add the key, with the number of tokens that it was trained for"
    if architecture.startswith(_WITHOUT_LENGTH):
        remedy = (
            "models without one are not supported: those that keep another state than keys and "
            "values (Mamba, RWKV), and those with attention of another form (BLOOM, Falcon 1, MPT)"
        )
    raise BadModelFolder(
        f"{path}: max_position_embeddings must be a positive integer, got None: architecture "
        f"{architecture!r} states no length that it was trained for; {remedy}"
    )


def _extended(config: dict[str, Any], architecture: str) -> int:
    """Positions to which YaRN extends the model, 0 without: some folders are extended by these
    settings alone (Qwen2.5). Malformed ones are refused where all of them are read."""
    table = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(table, dict) or "yarn" not in (table.get("rope_type"), table.get("type")):
        return 0
    if architecture == "Phi3ForCausalLM":  # there it is another name of LongRoPE
        return 0
    key = "original_max_position_embeddings"
    trained, factor = config.get(key) or table.get(key), table.get("factor")
    if not isinstance(trained, int) or not isinstance(factor, int | float):
        return 0
    length = trained * factor
    return int(length) if 0 < length < 2**31 else 0


def _no_multimodal_model(config: dict[str, Any], architecture: str, path: Path) -> None:
    """Raises ``BadModelFolder`` for a config that wraps that of a text model."""
    text = config.get("text_config")
    if not isinstance(text, dict) or config.get("vocab_size") is not None:
        return
    classes = text.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else text.get("model_type")
    part = f" ({name!r} in text_config)" if isinstance(name, str) else ""
    raise BadModelFolder(
        f"{path}: architecture {architecture!r} is a multimodal model, which is not supported; a "
        f"folder with its text model alone{part} may be"
    )


def _end_tokens(source: dict[str, Any], vocab_size: int, path: Path) -> list[int]:
    """``eos_token_id``: an id, a list of them, or nothing.

    Ids outside the vocabulary end nothing and are left out (some checkpoints say -1).
    """
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int):
            raise BadModelFolder(f"{path}: eos_token_id must be token ids, got {each!r}")
    return [each for each in ids if 0 <= each < vocab_size]


def _sampling_defaults(generation: dict[str, Any], path: Path) -> dict[str, float]:
    """What is checked here for its range is not refused later, request by request."""
    defaults: dict[str, float] = {}
    drawn = generation.get("do_sample", True)
    for name in DEFAULTS if drawn else ("repetition_penalty",):
        value = generation.get(name)
        if value is None:
            continue
        if name == "top_k" and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            defaults[name] = parse_field(name, value)
        except InvalidValue as error:
            raise BadModelFolder(f"{path}: {error}") from None
    return defaults


def fingerprint(folder: str | Path) -> str:
    """Names the files that say which model it is: 16 hexadecimal digits, or empty without them."""
    digest = hashlib.blake2b(digest_size=8)
    found = False
    for name in SHARED_FILES:
        try:
            content = read_text(Path(folder) / name)
        except BadModelFolder:
            continue
        found = True
        digest.update(f"{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest() if found else ""


def end_tokens(folder: str | Path) -> list[int]:
    """Of its model; none where the folder does not say what it is."""
    try:
        return read_model_info(folder).eos_token_ids
    except BadModelFolder:
        return []


def no_gguf(root: Path) -> None:
    """Raises ``BadModelFolder`` for a GGUF file as a model, and for a folder that has nothing
    else."""
    files = [root] if root.suffix == ".gguf" else []
    if root.is_dir() and not (root / "config.json").exists():
        files = sorted(root.glob("*.gguf"))
    if files:
        raise BadModelFolder(
            f"{files[0]}: a GGUF file alone is not served; put config.json and tokenizer of the "
            "model that it was made from beside it and give the folder, or use the repository on "
            "the Hugging Face hub with the model's safetensors"
        )


def read_model_info(folder: str | Path) -> ModelInfo:
    """Read ``config.json`` and ``generation_config.json``. Raises ``BadModelFolder``."""
    root = Path(folder)
    no_gguf(root)
    if root.is_file():
        raise BadModelFolder(f"{root}: a file, not a folder; {WHAT_MODEL_IS}")
    if not root.is_dir():
        raise BadModelFolder(f"{root}: no such folder; {WHAT_MODEL_IS}")
    path = root / "config.json"
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadModelFolder(f"{path}: expected an object")
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str):
        raise BadModelFolder(f"{path}: architectures must name the model class")
    generation: dict[str, Any] = {}
    generation_path = root / "generation_config.json"
    if generation_path.exists():
        read = read_json(generation_path)
        if not isinstance(read, dict):
            raise BadModelFolder(f"{generation_path}: expected an object")
        generation = read
    _no_multimodal_model(config, architecture, path)
    vocab_size = _number(config, "vocab_size", path)
    eos = _end_tokens(generation, vocab_size, generation_path)
    return ModelInfo(
        folder=root,
        architecture=architecture,
        vocab_size=vocab_size,
        max_model_len=_longest(config, architecture, path),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=eos or _end_tokens(config, vocab_size, path),
        defaults=_sampling_defaults(generation, generation_path),
        config=config,
    )
