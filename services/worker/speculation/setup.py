"""What an engine drafts with, by its configuration and sizes."""

from __future__ import annotations

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.graph_sizes import DRAFTED_ROWS, drafted_sizes
from penstock.services.worker.model_weights import make_model
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.eagle3 import read_eagle3
from penstock.services.worker.models.eagle3_head import load_eagle3
from penstock.services.worker.slots import SlotTable
from penstock.services.worker.speculation.draft_model import DraftModelDrafter
from penstock.services.worker.speculation.draft_shape import read_draft_model
from penstock.services.worker.speculation.drafting import Drafting
from penstock.services.worker.speculation.eagle3_drafter import Eagle3Drafter
from penstock.services.worker.speculation.model_drafter import ModelDrafter
from penstock.services.worker.speculation.model_drafting import ModelDrafting
from penstock.services.worker.speculation.proposer import SpeculativeProposer
from penstock.services.worker.speculation.step_costs import DraftBudget
from penstock.services.worker.speculation.text_proposers import NgramProposer, SuffixProposer

GPU_LEAST_GAIN, GPU_TRIED_EVERY = 0.1, 256
"""As ``LEAST_GAIN`` and ``TRIED_EVERY``. A step with drafts leaves the device idle ahead of it and
behind it, which is measured, but less exactly than a step."""


def make_drafting(
    config: Config,
    sizes: EngineSizes,
    *,
    generates: bool,
    drafter: ModelDrafter | None = None,
) -> Drafting | None:
    """``None``: nothing is drafted. drafter: what drafts, if texts do not. Raises ``ConfigError``
    where the sizes leave no room for drafts that were asked for by name."""
    wanted = config.speculation
    if not (generates and may_draft(config)):
        return None
    on_gpu = config.device.device == "cuda"
    most = min(wanted.speculative_tokens, sizes.max_num_batched_tokens // sizes.max_num_seqs - 1)
    if not wanted.drafts and (most < 1 or (on_gpu and sizes.max_num_seqs == 1)):
        return None
    if on_gpu:
        if sizes.max_num_seqs == 1:
            raise ConfigError(
                f"--speculative {wanted.speculative}: --max-num-seqs 1 is memory for the logits of "
                "one row; sequences and drafts of a step on a GPU are that many together, so set "
                "--max-num-seqs 2 or more"
            )
        most = min(most, sizes.max_num_seqs - 1)
    if most < 1:
        raise ConfigError(
            f"--speculative {wanted.speculative}: a step holds {sizes.max_num_batched_tokens} "
            f"tokens (--max-num-batched-tokens) of {sizes.max_num_seqs} sequences "
            "(--max-num-seqs), and needs two or more of each; lower --max-num-seqs"
        )
    budget = _budget(sizes, on_gpu=on_gpu)
    if drafter is not None:
        return ModelDrafting(drafter, most, budget)
    proposer: SpeculativeProposer = (
        NgramProposer()
        if wanted.speculative == "ngram"
        else SuffixProposer(wanted.speculative_history)
    )
    return Drafting(proposer, most, budget)


def may_draft(config: Config) -> bool:
    """Whether something may be drafted. ``auto`` may draft where no other setting forbids it."""
    wanted, device = config.speculation, config.device
    if device.device not in {"cpu", "cuda"} or config.cluster.world_size > 1:
        return False
    if wanted.speculative != "auto":
        return wanted.drafts
    unlike = bool(config.loading.lora or config.launch.lora_dirs)
    unlike |= config.cache.kv_cache_dtype != "auto"
    return not (device.deterministic or (device.device == "cuda" and unlike))


def make_drafter(
    config: Config, info: ModelInfo, model: CausalModel, slots: SlotTable
) -> ModelDrafter | None:
    """What drafts beside the target; ``None``: drafts come from texts, or there are none. Raises
    ``BadModelFolder`` for its folder, and ``ConfigError`` where it cannot draft for the model."""
    if not config.speculation.by_model:
        return None
    folder = config.speculation.speculative_model
    try:
        if config.speculation.speculative == "draft-model":
            return _draft_model(config, info, model, slots)
        return _head(config, info, model, slots)
    except MemoryError as failure:
        raise ConfigError(
            f"KV memory of the drafts of {folder}: {failure}; lower --num-kv-blocks or "
            "--kv-cache-memory-bytes"
        ) from failure


def _draft_model(
    config: Config, info: ModelInfo, model: CausalModel, slots: SlotTable
) -> ModelDrafter:
    draft, its_config = read_draft_model(config, info)
    longest = slots.capacity.max_model_len
    if draft.max_model_len < longest:
        raise ConfigError(
            f"--speculative-model {draft.folder}: trained for {draft.max_model_len} positions, and "
            f"sequences may have {longest}; lower --max-model-len"
        )
    loaded = make_model(
        its_config, draft, model.dtype, model.device, lambda note: None, lambda report: None
    )
    return DraftModelDrafter(loaded, slots)


def _head(config: Config, info: ModelInfo, model: CausalModel, slots: SlotTable) -> ModelDrafter:
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"--speculative {config.speculation.speculative}: a head reads the layers of a model "
            "of Penstock's own families, and transformers' code computes this one; use "
            "--speculative suffix"
        )
    head, checkpoint = read_eagle3(config.speculation.speculative_model, info)
    return Eagle3Drafter(load_eagle3(head, checkpoint, model.weights.embedding), model, slots)


def _budget(sizes: EngineSizes, *, on_gpu: bool) -> DraftBudget:
    if not on_gpu:
        return DraftBudget(sizes.max_num_batched_tokens)
    most = min(sizes.max_num_seqs, DRAFTED_ROWS[-1])
    return DraftBudget(
        most,
        ladder=drafted_sizes(most),
        least_gain=GPU_LEAST_GAIN,
        tried_every=GPU_TRIED_EVERY,
    )
