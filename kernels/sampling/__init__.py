"""Choosing the next token of every row: the rules, and their computation in torch.

A row's logits pass these steps in order, each a module of its own; a row that does not ask for a
step is not touched by it, and no row's result depends on another row:

1. ``allowed_tokens``, ``token_biases``: what may not come becomes -inf, biases are added. Bans by
   ``bad_words`` are found from the latest output tokens.
2. ``penalties``: repetition, then frequency and presence.
3. Below ``greedy_below`` the highest logit wins. Other rows are divided by their temperature,
4. ``keep_floor``: restricted by min_p, then top_k, then top_p, and
5. ``gumbel``: drawn from what is left, by noise that is a hash of the row's key and the token.

A row that asks for more has ``stages``: samplers (``samplers``) in an order of its own, after step
2, with the temperature and the limits of 3 and 4 among them. ``suffix_matches`` finds what would
repeat a sequence; ``dry`` and ``no_repeat_ngram`` make biases and bans of step 1 of it.

``logprobs`` are those of the logits as they came. Steps 1 and 2 are *adjustments*: a new one is a
class with the two members of ``choose.Adjustment``.
"""

from penstock.kernels.sampling.allowed_tokens import AllowedTokens, allowed_mask
from penstock.kernels.sampling.bad_words import WordTable
from penstock.kernels.sampling.choose import (
    NOT_FINITE,
    NOTHING_LEFT,
    Adjustment,
    Choice,
    bad_rows,
    choose,
    sample,
)
from penstock.kernels.sampling.gumbel import exponential
from penstock.kernels.sampling.keep_floor import CANDIDATES
from penstock.kernels.sampling.logprobs import MOST_LOGPROBS, Logprobs, logprobs
from penstock.kernels.sampling.most_likely import most_likely
from penstock.kernels.sampling.penalties import (
    Penalties,
    add_outputs,
    begin_counts,
    packed_counts,
)
from penstock.kernels.sampling.rows import SamplingRows
from penstock.kernels.sampling.stages import SamplerStages, Stage, model_logprob
from penstock.kernels.sampling.token_biases import TokenBiases

__all__ = [
    "CANDIDATES",
    "MOST_LOGPROBS",
    "NOTHING_LEFT",
    "NOT_FINITE",
    "Adjustment",
    "AllowedTokens",
    "Choice",
    "Logprobs",
    "Penalties",
    "SamplerStages",
    "SamplingRows",
    "Stage",
    "TokenBiases",
    "WordTable",
    "add_outputs",
    "allowed_mask",
    "bad_rows",
    "begin_counts",
    "choose",
    "exponential",
    "logprobs",
    "model_logprob",
    "most_likely",
    "packed_counts",
    "sample",
]
