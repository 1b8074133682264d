"""What an engine drafts with, by its configuration and sizes."""

from __future__ import annotations

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.graph_sizes import LEAST_TILES
from penstock.services.worker.speculation.drafting import Drafting
from penstock.services.worker.speculation.proposer import SpeculativeProposer
from penstock.services.worker.speculation.step_costs import DraftBudget
from penstock.services.worker.speculation.text_proposers import NgramProposer, SuffixProposer

GPU_LEAST_GAIN, GPU_TRIED_EVERY = 0.1, 256
"""As ``LEAST_GAIN`` and ``TRIED_EVERY``. A step with drafts leaves the device idle ahead of it and
behind it, which is measured, but less exactly than a step."""


def make_drafting(config: Config, sizes: EngineSizes, *, generates: bool) -> Drafting | None:
    """``None``: nothing is drafted. Raises ``ConfigError`` where the sizes leave no room for drafts
    that were asked for by name."""
    wanted = config.speculation
    if wanted.speculative in {"auto", "off"} or not generates:
        return None
    on_gpu = config.device.device == "cuda"
    if not (on_gpu or config.device.device == "cpu") or config.cluster.world_size > 1:
        return None
    most = min(wanted.speculative_tokens, sizes.max_num_batched_tokens // sizes.max_num_seqs - 1)
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
    proposer: SpeculativeProposer = (
        NgramProposer()
        if wanted.speculative == "ngram"
        else SuffixProposer(wanted.speculative_history)
    )
    return Drafting(proposer, most, _budget(sizes, on_gpu=on_gpu))


def _budget(sizes: EngineSizes, *, on_gpu: bool) -> DraftBudget:
    if not on_gpu:
        return DraftBudget(sizes.max_num_batched_tokens)
    return DraftBudget(
        sizes.max_num_seqs,
        apart=True,
        least_gain=GPU_LEAST_GAIN,
        tried_every=GPU_TRIED_EVERY,
        most_drafted=LEAST_TILES,  # each is a chunk, and a step without a graph takes the host long
    )
