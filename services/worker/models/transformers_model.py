"""Models computed by transformers' own code, over our paged KV cache.

All rows of a step go through the modelling code as one sequence; its attention is replaced, through
the library's attention interface, by one that writes K and V into the cache and attends to each
row's own sequence. So continuous batching, prefix cache, preemption and the sampler are those of
every other model. What the library would do with a mask or a cache of its own never happens.

Once it is loaded the model runs on a few tokens, which shows how many layers attend, over which
heads, with which window, whether positions are taken as they are given, and how logits follow from
the LM head's input. A model that keeps another state than keys and values, or attends in a way that
is not known here, is refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.models.causal_model import StepAttention, StepInputs
from penstock.services.worker.models.experts import num_experts, words_of_experts
from penstock.services.worker.models.query_temperature import QueryTemperatures
from penstock.services.worker.models.specification import CacheSpecification

PROBE_TOKENS = 5
_PACKED_POSITIONS = (3, 4, 0, 1, 2, 0, 1)
_PACKED_SEQUENCES = (0, 0, 0, 0, 0, 1, 1)
"""The rows of the second probe: one sequence out of order, and one beside it."""
_TOLERANCE = 1e-2
_HALF_TOLERANCE = 0.1
"""Of a hidden state in bfloat16 or float16, where rounding may send a token to another expert."""
_MEANINGLESS = frozenset(
    {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"}
)
"""Arguments of attention that change nothing: rows carry their positions, and all is causal."""
_numbers = itertools.count()


class _Captured(Exception):
    """The LM head's input; raised to leave the rest of a forward pass out."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class TransformersModel:
    """A ``CausalModel`` of transformers' modelling code."""

    packed = False

    def __init__(
        self, info: ModelInfo, dtype: torch.dtype, device: torch.device, model: Any
    ) -> None:
        """model: of transformers, on the device. On torch's meta device it shows what does not
        depend on numbers. Raises ``BadModelFolder``."""
        self._info, self.dtype, self.device = info, dtype, device
        self.vocab_size = info.vocab_size
        self._model = model.eval().requires_grad_(False)
        self.num_parameters = sum(each.numel() for each in self._model.parameters())
        self.hidden_size = 0
        self._attention: StepAttention | None = None
        """Of the present step; ``None`` in a probe."""
        self.caches: list[CacheSpecification] = []
        self.refusal = ""
        """Why no family of our own computes it; empty if there is none."""
        self.replaced = ""
        """What of the modelling code our kernels compute."""
        self._temperatures = QueryTemperatures(model)
        self._positions = torch.empty(0)
        """[N]: of the present step's rows."""
        self._recording = False
        self._visible = torch.empty(0)
        """bool [N, N]: which rows of a probe each of its rows attends to."""
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise self._refused("it has no LM head")
        self._head.register_forward_pre_hook(_capture)
        self._finish: Callable[[Tensor], Tensor] = lambda logits: logits
        if getattr(model, "_is_stateful", False):
            raise self._refused("its layers keep another state than keys and values")
        name = f"penstock_{next(_numbers)}"
        _interface().register(name, self._attend)
        try:
            model.set_attn_implementation(name)
            with torch.inference_mode():
                self._probe()
        except BadModelFolder:
            raise
        except Exception as failure:  # whatever the modelling code raises
            if device.type == "meta":  # it looks at numbers, and there are none
                return
            reason = " ".join(str(failure).split())[:200]
            raise self._refused(f"its code raises {type(failure).__name__}: {reason}") from failure
        if device.type == "cuda":
            self.replaced = _use_kernels(self._model, dtype, device)

    def prepare(self, max_positions: int) -> None:
        """Raises ``BadModelFolder`` for positions that the modelling code treats by batch."""
        settings = getattr(self._model.config, "rope_parameters", None) or {}
        of_kinds = [table for table in settings.values() if isinstance(table, dict)]
        for table in (settings, *of_kinds):
            trained = table.get("original_max_position_embeddings", max_positions)
            if table.get("rope_type") == "longrope" and max_positions > trained:
                raise self._refused(
                    "its LongRoPE factors depend on the longest sequence of a batch beyond "
                    f"{trained} positions; give --max-model-len {trained}"
                )

    def hidden(self, step: StepInputs, rows: Tensor | None) -> Tensor:
        """See ``CausalModel``: the LM head's input, behind the last norm."""
        self._attention, self._positions = step.attention, step.positions
        hidden = self._run(step.tokens, step.positions)
        return hidden if rows is None else hidden.index_select(0, rows)

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), vocab]: of some rows of what ``hidden`` returned; ``None``: of all."""
        return self._finish(self._project(self.last_hidden(hidden, rows)))

    def last_hidden(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), hidden]: of some rows of what ``hidden`` returned; ``None``: of all."""
        return hidden if rows is None else hidden.index_select(0, rows)

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The modelling code up to its LM head: [N, hidden]."""
        try:
            self._model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        except _Captured as captured:
            return captured.hidden.reshape(len(tokens), -1)
        raise self._refused("its LM head is not used")

    def _project(self, hidden: Tensor) -> Tensor:
        """[N, vocab]: the LM head alone, without the hook that ends a forward pass."""
        logits: Tensor = self._head.forward(hidden)
        return logits[:, : self.vocab_size]

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Called by the modelling code in each layer, in their order.

        query: [1, Hq, N, D]; key, value: [1, Hkv, N, D]; s_aux: [Hq] sinks. Returns [1, N, Hq, D].
        """
        rows, heads, dim = query.shape[2], query.shape[1], query.shape[3]
        scale = dim**-0.5 if scaling is None else scaling
        if self._attention is None:
            if self._recording:
                others["attention_mask"] = attention_mask
                self._record(
                    module, query, key, value, scale, sliding_window, softcap, s_aux, others
                )
            return self._plain(query, key, value, scale, softcap, s_aux), None
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        layer = module.layer_idx
        query = self._temperatures.scaled(layer, query, self._positions)
        output = self._attention(layer, query, key, value, s_aux)
        return output.view(1, rows, heads, dim), None

    def _record(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        others: dict[str, Any],
    ) -> None:
        """Record what a layer keeps, in the first probe."""
        unknown = [
            name
            for name, argument in others.items()
            if argument is not None and argument is not False and name not in _MEANINGLESS
        ]
        if unknown:
            raise self._refused(f"its attention has {', '.join(unknown)}")
        if not getattr(module, "is_causal", True):
            raise self._refused("its attention is not causal")
        if getattr(module, "layer_idx", None) != len(self.caches):
            raise self._refused("its layers are not numbered in their order")
        if key.shape != value.shape or query.shape[3] != key.shape[3]:
            raise self._refused(f"it has keys of {key.shape[3]} and values of {value.shape[3]}")
        longest = self._info.max_model_len
        kept = window if window and window < longest else 0
        self.caches.append(
            CacheSpecification(
                key.shape[1], key.shape[3], query.shape[1], kept, softcap or 0.0, scale,
                sinks is not None,
            )
        )  # fmt: skip

    def _plain(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention among the few tokens of a probe, without a cache."""
        shared = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(shared, 1) for each in (key, value))
        scores = query.float() @ keys.float().transpose(2, 3) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill_(~self._visible, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], -1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., : values.shape[2]]
        return (weights @ values.float()).to(query.dtype).transpose(1, 2).contiguous()

    def _probe(self) -> None:
        """Run the model on a few tokens. Raises ``BadModelFolder``."""
        tokens = torch.arange(1, PROBE_TOKENS + 1, device=self.device) % self.vocab_size
        positions = torch.arange(PROBE_TOKENS, device=self.device)
        self._visible = positions[:, None] >= positions
        self._recording = True
        hidden = self._run(tokens, positions)
        self._recording = False
        self.hidden_size = hidden.shape[-1]
        self._check_layers()
        if self.device.type == "meta":
            return
        self._find_finish(tokens, positions, hidden)
        self._check_positions(tokens, hidden)

    def _check_layers(self) -> None:
        """Every layer was recorded, and with the window that it has."""
        config = self._model.config
        if len(self.caches) != config.num_hidden_layers:
            raise self._refused(
                f"{len(self.caches)} of {config.num_hidden_layers} layers attend through the "
                "library's interface"
            )
        self._find_chunks()
        windows = any(cache.window for cache in self.caches)
        window = getattr(config, "sliding_window", None) or self._info.max_model_len
        used = getattr(config, "use_sliding_window", None) is not False
        if used and not windows and window < self._info.max_model_len:
            raise self._refused(
                f"it does not tell its attention which layers have the window of {window} positions"
            )

    def _find_chunks(self) -> None:
        """Layers that attend in chunks do not tell their attention so: the library has a mask."""
        config = self._model.config
        chunk = getattr(config, "attention_chunk_size", None) or 0
        chunk = chunk if chunk < self._info.max_model_len else 0
        kinds = getattr(config, "layer_types", None) or ()
        for layer, kind in enumerate(kinds[: len(self.caches)]):
            if kind == "chunked_attention":
                self.caches[layer] = replace(self.caches[layer], chunk=chunk)

    def _check_positions(self, tokens: Tensor, hidden: Tensor) -> None:
        """Rows of two sequences, out of order, give what each sequence gives alone.

        A step has the rows of many sequences; modelling code that counts positions itself would
        number them through. The second sequence is a prefix of the first.
        """
        positions = torch.tensor(_PACKED_POSITIONS, device=self.device)
        sequences = torch.tensor(_PACKED_SEQUENCES, device=self.device)
        same = sequences[:, None] == sequences
        self._visible = same & (positions[:, None] >= positions)
        alone = hidden[positions].float()
        difference = self._run(tokens[positions], positions).float() - alone
        worst = float((difference.norm(dim=-1) / alone.norm(dim=-1)).max())
        tolerance = _TOLERANCE if self.dtype.itemsize > 2 else _HALF_TOLERANCE
        if not worst <= tolerance:
            raise self._refused("its code does not use the positions that it is given")

    def _find_finish(self, tokens: Tensor, positions: Tensor, hidden: Tensor) -> None:
        """Find out how logits follow from the LM head's output."""
        hook, self._head._forward_pre_hooks = self._head._forward_pre_hooks, {}
        try:
            wanted = self._model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False
            ).logits[0, :, : self.vocab_size]
        finally:
            self._head._forward_pre_hooks = hook
        plain = self._project(hidden)
        cap = float(getattr(self._model.config, "final_logit_softcapping", None) or 0.0)
        factor = float((wanted.float() / plain.float()).median())
        finishes: list[Callable[[Tensor], Tensor]] = [
            lambda logits: logits,
            lambda logits: logits * factor,
        ]
        if cap:
            finishes.append(lambda logits: (logits / cap).tanh_() * cap)
        for finish in finishes:
            if torch.allclose(finish(plain).float(), wanted.float(), _TOLERANCE, _TOLERANCE):
                self._finish = finish
                return
        raise self._refused("what follows its LM head is not known")

    def _refused(self, why: str) -> BadModelFolder:
        if count := num_experts(self._info):
            why += f"; {words_of_experts(self._info.architecture, count)}: take a dense model"
        return BadModelFolder(
            f"{self._info.folder / 'config.json'}: architecture {self._info.architecture!r} is "
            f"not supported, neither by a family of our own nor through transformers: {why}"
        )


def _use_kernels(model: Any, dtype: torch.dtype, device: torch.device) -> str:
    """See ``module_kernels.use_kernels``; nothing where Triton does not work."""
    from penstock.services.worker.gpu.triton_trial import why_no_kernels

    if why_no_kernels(device):
        return ""
    from penstock.services.worker.gpu.module_kernels import use_kernels

    return use_kernels(model, dtype)


def _capture(module: Any, inputs: tuple[Tensor, ...]) -> None:
    raise _Captured(inputs[0])


def _interface() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS
