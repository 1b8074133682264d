"""What an engine drafts with, by its configuration and sizes."""

from __future__ import annotations

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.speculation.drafting import Drafting
from penstock.services.worker.speculation.proposer import SpeculativeProposer
from penstock.services.worker.speculation.step_costs import DraftBudget
from penstock.services.worker.speculation.text_proposers import NgramProposer, SuffixProposer


def make_drafting(config: Config, sizes: EngineSizes, *, generates: bool) -> Drafting | None:
    """``None``: nothing is drafted. Raises ``ConfigError`` where the sizes leave no room for drafts
    that were asked for by name."""
    wanted = config.speculation
    if wanted.speculative in {"auto", "off"} or not generates:
        return None
    if config.device.device != "cpu" or config.cluster.world_size > 1:
        return None
    most = min(wanted.speculative_tokens, sizes.max_num_batched_tokens // sizes.max_num_seqs - 1)
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
    return Drafting(proposer, most, DraftBudget(sizes.max_num_batched_tokens))
