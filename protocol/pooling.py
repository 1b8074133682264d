"""What a model folder makes of a prompt: read from its files, without torch.

A folder of sentence-transformers says it in ``modules.json`` and beside it, a sequence classifier
by its architecture; ``--task`` and ``--pooling`` override both. Worker and tokenizer read the same
files: the worker pools and multiplies, the tokenizer puts prompts ahead of texts, cuts vectors,
normalizes them, and turns logits into scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.protocol.config.fields import ModelConfig
from penstock.protocol.judging import (
    JUDGED,
    MODULES,
    JudgeForm,
    judge_form,
    judge_tokens,
    within,
)
from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_json
from penstock.protocol.tasks import CLASSIFY, EMBED, GENERATE, SCORE
from penstock.protocol.vector_lengths import VectorLengths, vector_lengths

PoolingKind = Literal["last", "cls", "mean", "max"]
Activation = Literal["none", "sigmoid", "softmax"]

ENCODER_FAMILIES = (
    "Bert", "Roberta", "XLMRoberta", "Camembert", "MPNet", "DistilBert", "ModernBert",
)  # fmt: skip
_CLASSIFIER = "ForSequenceClassification"
_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""The latter of older ones, as GPT-2."""
_ENCODERS = {
    f"{family}{form}"
    for family in ENCODER_FAMILIES
    for form in ("Model", "ForMaskedLM", _CLASSIFIER)
}
_KINDS: dict[str, PoolingKind] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "max": "max",
    "max_tokens": "max",
    "lasttoken": "last",
}
"""Names of sentence-transformers, new and old."""
BIDIRECTIONAL = "use_bidirectional_attention"
"""In ``config.json``: a decoder each of whose positions attends to all others."""
SENTENCE_CONFIG = "config_sentence_transformers.json"


class DenseModule(msgspec.Struct, frozen=True):
    """A linear layer behind pooling."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """``identity`` or ``tanh``, say: a name of ``torch.nn``'s class in lower case."""


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine of a folder does, and how."""

    tasks: list[str]
    """Of ``embed``, ``score`` and ``classify``."""
    generates: bool
    kind: PoolingKind
    encoder: bool
    """Each position attends to all others: prompts are computed whole."""
    reason: str
    """Why, for the log."""
    normalizes: bool = True
    """Vectors have length 1."""
    dense: list[DenseModule] = []
    lengths: VectorLengths = VectorLengths()
    """To which vectors may be cut."""
    prompts: dict[str, str] = {}
    """What may stand ahead of a text, by name."""
    default_prompt: str = ""
    """The name of the prompt that stands there unless another is asked for."""
    labels: list[str] = []
    """Of the logits of ``score`` and ``classify``, in their order."""
    activations: dict[str, Activation] = {}
    """What becomes of the logits, by task."""
    judged_by: list[int] = []
    """Of a language model that judges: the tokens that say no and yes, where its folder names
    them."""
    judge: JudgeForm = ""
    """Of such a model: whose words stand around a pair."""
    lowers: bool = False
    """Texts are written in small letters first."""

    @property
    def is_judge(self) -> bool:
        """A language model scores a pair by its logits of "yes" and "no"."""
        return bool(self.judge)

    @property
    def is_cached(self) -> bool:
        """What was computed of a prompt serves another one that begins alike."""
        return not self.encoder and self.kind == "last"

    def describe(self) -> str:
        done = [*([GENERATE] if self.generates else []), *self.tasks]
        pooled = f", {self.kind} pooling" if self.tasks else ""
        return f"tasks: {', '.join(done)}{pooled} ({self.reason})"


def attends_both_ways(info: ModelInfo) -> bool:
    """Whether a decoder's layers make an encoder. (``vision``, as some models say, means that only
    the parts of an image see each other.)"""
    return info.config.get(BIDIRECTIONAL) in (True, "all")


def read_pooling(info: ModelInfo, config: ModelConfig) -> Pooling:
    """Raises ``BadModelFolder`` for what the folder asks for and is not there, and for a ``--task``
    that the model cannot do."""
    name, task = info.architecture, str(config.task)
    is_classifier, is_causal = name.endswith(_CLASSIFIER), name.endswith(_CAUSAL)
    encoder = name in _ENCODERS or attends_both_ways(info)
    modules = info.folder / MODULES
    if task == "auto":
        if is_classifier:
            task, reason = CLASSIFY, f"architecture {name}"
        elif modules.is_file():
            task, reason = SCORE if judge_tokens(info.folder) else EMBED, MODULES
        elif is_causal or not (encoder or name.endswith("Model")):
            task, reason = GENERATE, f"architecture {name}"
        else:
            task, reason = EMBED, f"architecture {name}"
    else:
        reason = f"--task {task}"
    if task in (CLASSIFY, SCORE) and (is_classifier or is_causal) and config.pooling != "auto":
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: --pooling {config.pooling}: which positions the task "
            f"{task!r} of a {name} is made of is a part of the model; leave the flag out, or make "
            "vectors with --task embed"
        )
    if is_classifier and task in (CLASSIFY, SCORE):
        return _classifier(info, config, task, reason, encoder)
    if task == SCORE and is_causal:
        default = _prompts(info.folder)[1]
        return Pooling(
            tasks=[SCORE], generates=False, kind="last", encoder=False, labels=JUDGED,
            activations={SCORE: "softmax"}, reason=f"{reason}: logits of yes and no",
            prompts=_prompts(info.folder)[0], judged_by=judge_tokens(info.folder),
            judge=judge_form(info), default_prompt=default,
        )  # fmt: skip
    if (task == GENERATE and not is_causal and config.task != "auto") or task in (CLASSIFY, SCORE):
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: {reason}: a {name} does not do the task {task!r}; "
            + (
                "leave the flag out, and the folder decides"
                if config.task != "auto"
                else "choose one with --task"
            )
        )
    if task == GENERATE and config.pooling == "auto":
        return Pooling(tasks=[], generates=True, kind="last", encoder=False, reason=reason)
    return _embedding(info, config, task, reason, encoder)


def _embedding(
    info: ModelInfo, config: ModelConfig, task: str, reason: str, encoder: bool
) -> Pooling:
    kind: PoolingKind = "mean" if encoder else "last"
    normalizes, dense = True, list[DenseModule]()
    prompts, default = _prompts(info.folder)
    if (info.folder / MODULES).is_file():
        kind, normalizes, dense = _modules(info.folder, kind, prompted=any(prompts.values()))
        reason = reason if reason == MODULES else f"{reason}, {MODULES}"
    if config.pooling != "auto":
        kind, reason = config.pooling, f"{reason}, --pooling {config.pooling}"
    return Pooling(
        tasks=[EMBED],
        generates=task == GENERATE,
        kind=kind,
        encoder=encoder,
        reason=reason,
        normalizes=normalizes,
        dense=dense,
        lengths=VectorLengths(least=1) if config.allow_dimensions else vector_lengths(info),
        prompts=prompts,
        default_prompt=default,
        lowers=_lowers(info.folder),
    )


def _classifier(
    info: ModelInfo, config: ModelConfig, task: str, reason: str, encoder: bool
) -> Pooling:
    labels = _labels(info)
    if task == SCORE and len(labels) > 1:
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: --task score: the model has {len(labels)} labels, and "
            "a score is of one; use --task classify"
        )
    tasks = [task] if config.task != "auto" else [SCORE, CLASSIFY][len(labels) > 1 :]
    pooled = str(info.config.get("classifier_pooling") or "cls")
    kind = _KINDS.get(pooled, "cls") if info.architecture in _ENCODERS else "last"
    return Pooling(
        tasks=tasks,
        generates=False,
        kind=kind,
        encoder=encoder,
        reason=f"{reason}, {len(labels)} label{'s' if len(labels) > 1 else ''}",
        labels=labels,
        activations={SCORE: _of_score(info), CLASSIFY: _of_classes(info, len(labels))},
        prompts=_prompts(info.folder)[0],
        lowers=_lowers(info.folder),
    )


def _lowers(folder: Path) -> bool:
    path = folder / "sentence_bert_config.json"
    return path.is_file() and _object(path).get("do_lower_case") is True


def _modules(
    folder: Path, kind: PoolingKind, *, prompted: bool
) -> tuple[PoolingKind, bool, list[DenseModule]]:
    """Pooling, normalization and dense layers of ``modules.json``. prompted: texts may stand behind
    a prompt."""
    listed = read_json(folder / MODULES)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise BadModelFolder(f"{folder / MODULES}: expected a list of objects")
    normalizes, dense = False, list[DenseModule]()
    for one in listed:
        name, place = str(one.get("type", "")).rpartition(".")[2], str(one.get("path", ""))
        inside = within(folder, place)
        match name:
            case "Transformer":
                if place:
                    raise BadModelFolder(
                        f"{folder / MODULES}: the model is in {place!r}; only folders with the "
                        "model itself at the top are supported"
                    )
            case "Pooling":
                kind = _pooling_kind(inside / "config.json", prompted)
            case "Normalize":
                normalizes = True
            case "Dense":
                dense.append(_dense(inside))
            case "Dropout":
                pass
            case "LogitScore":
                raise BadModelFolder(
                    f"{folder / MODULES}: its LogitScore rates pairs of texts and makes no "
                    "vectors; leave --task out, or use --task score"
                )
            case _:
                raise BadModelFolder(
                    f"{folder / MODULES}: modules of the type {name!r} are not supported; those "
                    "that are: Transformer, Pooling, Dense, Normalize and Dropout"
                )
    return kind, normalizes, dense


def _pooling_kind(path: Path, prompted: bool) -> PoolingKind:
    config = _object(path)
    if config.get("include_prompt") is False and prompted:
        raise BadModelFolder(
            f"{path}: include_prompt is false, but pooling without the prompt's tokens is not "
            "supported"
        )
    prefix = "pooling_mode_"
    names = [
        key.removeprefix(prefix) for key, on in config.items() if key.startswith(prefix) and on
    ]
    given = config.get("pooling_mode")
    if given is not None:
        names = list(given) if isinstance(given, list) else [str(given)]
    names = names or ["mean"]
    if len(names) > 1 or names[0] not in _KINDS:
        raise BadModelFolder(
            f"{path}: pooling by {' and '.join(map(str, names))} is not supported; these are: cls, "
            " mean, max and lasttoken: choose with --pooling"
        )
    return _KINDS[names[0]]


def _dense(folder: Path) -> DenseModule:
    path = folder / "config.json"
    config = _object(path)
    sizes = config.get("in_features"), config.get("out_features")
    if not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        raise BadModelFolder(f"{path}: in_features and out_features must be positive integers")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2].lower()
    if activation not in ("identity", "tanh", "gelu", "relu"):
        raise BadModelFolder(
            f"{path}: activation_function {activation!r}; supported are Identity, Tanh, GELU, ReLU"
        )
    bias = config.get("bias", True) is not False
    return DenseModule(folder, *sizes, bias, activation)  # type: ignore[arg-type]


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    """Prompts by name, and the default one's name."""
    path = folder / SENTENCE_CONFIG
    if not path.is_file():
        return {}, ""
    config = _object(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(one, str) for one in prompts.values()):
        raise BadModelFolder(f"{path}: prompts must be an object of texts")
    if default and default not in prompts:
        raise BadModelFolder(f"{path}: default_prompt_name {default!r} is none of the prompts")
    return prompts, str(default)


def _labels(info: ModelInfo) -> list[str]:
    """By ``id2label``; as in transformers two where the folder says nothing."""
    table = info.config.get("id2label")
    if isinstance(table, dict) and table:
        return [str(table.get(str(number), f"LABEL_{number}")) for number in range(len(table))]
    count = info.config.get("num_labels", 2)
    if type(count) is not int or not 0 < count < 65_536:
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: num_labels must be a positive integer"
        )
    return [f"LABEL_{number}" for number in range(count)]


def _of_score(info: ModelInfo) -> Activation:
    """As sentence-transformers' ``CrossEncoder`` takes it: a sigmoid, unless the folder names
    another function."""
    table = info.config.get("sentence_transformers")
    named = table.get("activation_fn") if isinstance(table, dict) else None
    named = named or info.config.get("sbert_ce_default_activation_function") or "Sigmoid"
    function = str(named).rpartition(".")[2]
    if function not in ("Sigmoid", "Identity"):
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: scores by {function} are not supported; supported are "
            "Sigmoid and Identity"
        )
    return "sigmoid" if function == "Sigmoid" else "none"


def _of_classes(info: ModelInfo, count: int) -> Activation:
    problem = info.config.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or count == 1 else "softmax"


def _object(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise BadModelFolder(f"{path}: expected an object")
    return found
