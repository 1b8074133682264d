"""An EAGLE-3 head as data: what its folder says, without torch.

The head of Li et al., *EAGLE-3*, 2025 (arXiv:2503.01840), in the form that its authors, SpecForge
and others publish: ``fc`` makes one row of the target's residual stream ahead of three layers; one
decoder layer reads it beside the embedding of the next token; an LM head of its own has the rows of
some tokens of the vocabulary, and ``d2t`` says how far behind its number in the vocabulary each is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.protocol.model_info import ModelInfo, read_model_info
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.linear_specification import LinearSpecification, layer_linears
from penstock.services.worker.models.specification import CacheSpecification, Layer, cache_of
from penstock.services.worker.quantization.format import StoredTensor

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LAYER_NAMES = ("midlayer.", "layers.0.")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_UNUSED = ("t2d",)
"""``t2d`` says what ``d2t`` says."""
_NUM_CAPTURED = 3


class Eagle3Specification(msgspec.Struct, frozen=True):
    """Sizes and names of one head for one target."""

    folder: Path
    target_vocab: int
    target_hidden: int
    hidden_size: int
    draft_vocab: int
    layer: Layer
    """Its ``input_norm`` is that of the embedding; the features have another of the same kind."""
    captured_layers: tuple[int, ...]
    """Layers of the target; the residual stream ahead of them is read."""
    norm_before_residual: bool
    """Whether features are normed ahead of the residual stream, too."""
    prefix: str
    """Ahead of the layer's names in the files."""
    embeds: bool
    """Whether it has an embedding of its own."""

    @property
    def cache(self) -> CacheSpecification:
        return cache_of(self.layer)

    @property
    def linears(self) -> dict[str, LinearSpecification]:
        """``fc``, those of the layer, ``head``."""
        of_layer = layer_linears(self.layer, self.hidden_size)
        qkv = msgspec.structs.replace(of_layer.qkv, inputs=2 * self.hidden_size)
        width = len(self.captured_layers) * self.target_hidden
        return {
            "fc": LinearSpecification(width, (self.hidden_size,), ("fc",)),
            **of_layer._replace(qkv=qkv)._asdict(),
            "head": LinearSpecification(self.hidden_size, (self.draft_vocab,), ("lm_head",)),
        }

    @property
    def norms(self) -> Mapping[str, str]:
        """Names of the norms' weights in the files."""
        return {
            "embedding": f"{self.prefix}input_layernorm.weight",
            "features": f"{self.prefix}hidden_norm.weight",
            "mlp": f"{self.prefix}post_attention_layernorm.weight",
            "last": "norm.weight",
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every weight in the files, by its name."""
        found: dict[str, tuple[int, ...]] = {}
        for part, linear in self.linears.items():
            found |= linear.shapes("" if part in ("fc", "head") else self.prefix)
        found |= dict.fromkeys(self.norms.values(), (self.hidden_size,))
        if self.embeds:
            found["embed_tokens.weight"] = (self.target_vocab, self.hidden_size)
        return found

    @property
    def num_parameters(self) -> int:
        rows = self.target_vocab * self.hidden_size * self.embeds
        linears = sum(linear.num_parameters for linear in self.linears.values())
        return rows + linears + len(self.norms) * self.hidden_size


def read_eagle3(folder: str, target: ModelInfo) -> tuple[Eagle3Specification, Checkpoint]:
    """The head in a folder and its files, checked against each other and against the target's
    ``config.json``. Raises ``BadModelFolder``."""
    info = read_model_info(folder)
    reader, of_target = ConfigReader(info), ConfigReader(target)
    if info.architecture not in ARCHITECTURES:
        raise reader.error(
            f"architecture {info.architecture!r} is no EAGLE-3 head that is supported; those are "
            f"{', '.join(ARCHITECTURES)}"
        )
    if info.vocab_size != target.vocab_size:
        raise reader.error(
            f"vocab_size {info.vocab_size}: the target has {target.vocab_size}; a head drafts for "
            "the model that it was trained with"
        )
    if reader.num_layers != 1:
        raise reader.error(f"num_hidden_layers {reader.num_layers}: heads of one layer are served")
    checkpoint = Checkpoint(info.folder)
    shapes = checkpoint.shapes()
    norm, bias = reader.rms_norm(), reader.flag("attention_bias", False)
    attention = reader.attention(reader.rotary(), qkv_bias=bias, output_bias=bias)
    mlp = reader.mlp(bias=reader.flag("mlp_bias", False))
    prefix = next((p for p in _LAYER_NAMES if f"{p}hidden_norm.weight" in shapes), _LAYER_NAMES[0])
    head = Eagle3Specification(
        folder=info.folder,
        target_vocab=target.vocab_size,
        target_hidden=reader.integer("target_hidden_size", of_target.hidden_size),
        hidden_size=reader.hidden_size,
        draft_vocab=reader.integer("draft_vocab_size", info.vocab_size),
        layer=Layer(attention, mlp, norm, norm),
        captured_layers=_captured(reader, info, of_target.num_layers),
        norm_before_residual=reader.flag("norm_before_residual", False),
        prefix=prefix,
        embeds="embed_tokens.weight" in shapes,
    )
    _check(head, checkpoint, reader, of_target)
    return head, checkpoint


def _check(
    head: Eagle3Specification, checkpoint: Checkpoint, reader: ConfigReader, target: ConfigReader
) -> None:
    if head.target_hidden != target.hidden_size:
        raise reader.error(
            f"target_hidden_size {head.target_hidden}: the target has {target.hidden_size}"
        )
    if not head.embeds and head.hidden_size != target.hidden_size:
        raise reader.error(
            f"hidden_size {head.hidden_size}: a head without embed_tokens.weight reads the "
            f"target's embedding, which has {target.hidden_size}"
        )
    if head.draft_vocab > head.target_vocab:
        raise reader.error(f"draft_vocab_size {head.draft_vocab} is above {head.target_vocab}")
    maps = {
        "d2t": StoredTensor(
            ((head.draft_vocab,),), ("I64", "I32"), "codes",
            optional=head.draft_vocab == head.target_vocab,
        ),
    }  # fmt: skip
    checkpoint.check(head.shapes, lambda name: name in _UNUSED, maps)


def _captured(reader: ConfigReader, info: ModelInfo, layers: int) -> tuple[int, ...]:
    """The layers of the target ahead of which the residual stream is read. ``eagle_config`` names
    the layers behind which it is read, the same key outside of it those ahead of which."""
    nested = info.config.get("eagle_config")
    behind = nested.get(_LAYER_IDS) if isinstance(nested, dict) else None
    ahead = info.config.get(_LAYER_IDS)
    if behind is None and ahead is None:
        given = [2, layers // 2, layers - 3]
    else:
        named = behind if ahead is None else ahead
        if not isinstance(named, list) or not all(type(one) is int for one in named):
            raise reader.error(f"{_LAYER_IDS} must be numbers of layers, got {named!r}")
        given = [one + (ahead is None) for one in named]
    if len(given) != _NUM_CAPTURED or not all(0 <= one < layers for one in given):
        raise reader.error(
            f"the residual stream is read ahead of layers {given} of the target, which has "
            f"{layers}; supported are three of them"
        )
    return tuple(given)
