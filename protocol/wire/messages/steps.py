"""The step loop between a scheduler and its workers.

A plan is a difference. The worker keeps its batch in numbered slots; a slot whose prompt is
computed decodes one token in every step until a plan says that it is gone. So a decode step that
changes nothing is a few bytes, whatever the batch.

The rows of a step, in the order in which ``StepResult.tokens`` lists them:

1. every decoding slot of the plan's micro-batch, in ascending slot order;
2. every chunk of the plan with ``sample``, in plan order (its slot decodes from the next step on).
"""

from __future__ import annotations

import msgspec

from penstock.protocol.grammar.request import Grammar
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.wire.messages.engine import Adapter, EngineSizes, StepShape
from penstock.protocol.wire.messages.tokens import RowPooled

_encode = msgspec.msgpack.Encoder().encode


class Attach(msgspec.Struct, frozen=True, array_like=True, tag=40, gc=False):
    """Scheduler → worker: work for this scheduler from now on. A new epoch: drop all slots."""

    epoch: int
    reply_to: str
    group: list[int] = []
    """Incarnations of the engine's workers in the order of their ranks. A worker belongs to one
    group for life: asked to join another one, or a group that it is not in, it ends, and its
    replacement begins anew. Empty: no matter which."""
    rendezvous: str = ""
    """Where rank 0 lets the others find it: its ``Identity.rendezvous``."""


class Attached(msgspec.Struct, frozen=True, array_like=True, tag=41, gc=False):
    """Worker → scheduler: the model is loaded and KV memory is taken."""

    epoch: int
    rank: int
    sizes: EngineSizes
    shape: StepShape = StepShape()
    tasks: list[str] = []
    """What it does beside to generate."""
    generates: bool = True
    """Whether it generates."""
    labels: list[str] = []
    """What the scores of ``classify`` stand for, in their order."""
    adapters: list[Adapter] = []
    kv_space: bytes = b""
    """See ``TierOpen``; empty: its blocks are not kept outside of its memory."""
    kv_slot_bytes: int = 0
    kv_piece_bytes: int = 0
    """Copies of blocks run beside its steps: so many bytes may be on their way to the keeper from
    one message, and as many again ahead of a step that overwrites them. 0: they run between steps.
    """
    places: int = 0
    """``adapters`` that may be on its device at once."""
    resident: list[str] = []
    """Digests of those that are."""
    repeats: bool = False
    """See ``Capacity.repeats``."""


class SamplerStage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sampler of a slot."""

    sampler: str
    """A name of ``penstock.kernels.sampling.samplers.SAMPLERS``."""
    values: list[float]
    """Its numbers, in the order in which it takes them."""


class Dry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that would repeat a sequence lose something: ``penstock.kernels.sampling.dry``."""

    multiplier: float
    base: float
    allowed_length: int
    range: int = 0
    """0: all of prompt and output."""
    breakers: bytes = b""
    """Tokens that no sequence goes over, ascending."""


class SlotAdjustments(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What changes a slot's logits before its temperature. Rows of ids are int32, little endian."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    biased: bytes = b""
    """Token ids …"""
    biases: bytes = b""
    """… and what is added to their logits, float32."""
    allowed: bytes | None = None
    """Ids of the only tokens that may come; ``None``: all may."""
    bad_words: list[bytes] = []
    """Ids of words that may not come."""
    min_tokens: int = 0
    """None of ``ends`` comes before so many output tokens."""
    ends: bytes = b""
    grammar: Grammar | None = None
    """What the answer looks like. Its masks keep ``ends`` away while anything else is left."""
    stages: list[SamplerStage] = []
    """Samplers in the order in which they act, after all of the above, the temperature and the
    limits among them: the slot's own are then neutral. Empty: there are those of the slot alone."""
    dry: Dry | None = None
    no_repeat_ngram: int = 0
    """No sequence of so many tokens comes twice; 0: it may."""
    banned: bytes = b""
    """Ids of tokens that may not come …"""
    banned_until: int = 0
    """… before there are so many output tokens."""

    @property
    def penalised(self) -> bool:
        """Whether it matters which tokens have come before."""
        return self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0

    @property
    def reads_prompt(self) -> bool:
        """Whether it matters which tokens are in the prompt."""
        return self.repetition != 1.0 or self.repeats

    @property
    def repeats(self) -> bool:
        """Whether it matters what sequences have come before."""
        return self.dry is not None or self.no_repeat_ngram > 0

    @property
    def steers(self) -> bool:
        """Whether it matters how probable the output was to the model."""
        return any(stage.sampler == "mirostat" for stage in self.stages)


class SlotSampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request asks of the sampler, the same for all its choices.

    The tokenizer encodes it once (``packed``), the worker decodes it; in between nobody reads it.
    """

    temperature: float
    top_k: int
    """0: all."""
    top_p: float
    seed: int
    """Unsigned 64 bit. A draw is keyed by (seed, choice, output position)."""
    min_p: float = 0.0
    adjustments: SlotAdjustments | None = None
    """``None``: the logits are taken as they come."""
    logprobs: int | None = None
    """How many of the likeliest tokens to list with each token's logprob; ``None``: no logprobs."""

    def packed(self) -> bytes:
        """As ``TokenWork.sampling`` and ``NewSlot.sampling`` carry it."""
        return _encode(self)


class NewSlot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence takes a slot: new, or back from preemption or from another engine."""

    slot: int
    tokens: bytes
    """int32 ids of prompt and output so far, little endian, from position ``start`` on."""
    prompt_len: int
    """How many of the sequence's tokens are prompt; the rest are output."""
    num_computed: int
    """Positions whose K and V are in the cache already (prefix hits)."""
    blocks: list[int]
    """Block table for positions 0 …; ``Chunk.blocks`` extends it. Where layers have several groups:
    for each stretch of ``block_size`` positions one block of each group, in their order;
    ``NO_BLOCK`` where a group attends to nothing of it any more."""
    sampling: bytes
    """An encoded ``SlotSampling``: the slot's whole sampling state, but for ``choice``."""
    choice: int = 0
    prompt_logprobs: int | None = None
    """As ``SlotSampling.logprobs``, for the prompt's tokens from the second one on."""
    start: int = 0
    """Position of the first of ``tokens``: ``num_computed`` or less. A slot with adjustments gets
    all of its output, so there it is ``prompt_len`` or less."""
    prompt: int = -1
    """Place in ``StepPlan.prompts`` of the whole prompt, for a slot whose adjustments read it and
    whose ``tokens`` do not hold all of it."""
    task: str = ""
    """What is to be made of the prompt, once it is computed, instead of a token."""
    second: int = 0
    """Where the second text of a pair begins; 0: there is none."""
    adapter: str = ""
    """Digest of its adapter; empty: it has none."""
    trace: str = ""
    """The trace that its request belongs to, where it is sampled: 55 characters."""
    most: int = 0
    """Tokens at which the sequence ends at the latest; 0: nobody says."""
    corpus: bytes = b""
    """Drafts may be made for the slot: of its own text, and of others with the same corpus. The
    whole text is then there, as with adjustments that read it. Empty: none are made."""
    virtual_tokens: int = 0
    """The first so many of its prompt's tokens are the rows of its adapter's soft prompt. Their ids
    follow those of the vocabulary: row i has ``vocab_size`` + i."""

    @property
    def length(self) -> int:
        """Tokens of the sequence, also those that are not sent."""
        return self.start + len(self.tokens) // 4


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute ``count`` more positions of a slot's known tokens (prefill)."""

    slot: int
    start: int
    """First position; equals what is computed so far."""
    count: int
    sample: bool
    """The chunk reaches the last known token: sample the next one, then decode."""
    blocks: list[int]
    """Blocks appended to the slot's table before the chunk runs; several groups as in
    ``NewSlot.blocks``."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=42, gc=False):
    """One step. Executed in the order: ``gone``, ``added``, ``grown``, then compute."""

    epoch: int
    step: int
    """Numbered from 1 within an epoch, without gaps."""
    full: bool
    """Drop every slot first. The first plan of an epoch and the first after a failure."""
    gone: list[int]
    added: list[NewSlot]
    grown: list[int]
    """Flat pairs (slot, block): one block appended to a decoding slot's table; several groups as in
    ``NewSlot.blocks``."""
    chunks: list[Chunk]
    prompts: list[bytes] = []
    """Prompts that ``added`` points into: the choices of a request share one copy."""
    micro_batch: int = 0
    """The one that decodes; see ``EngineSizes.micro_batches``."""


class SampledLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of the token of one row."""

    row: int
    token: PackedLogprobs


class ChunkLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of the prompt's tokens that a chunk's rows predict: each row's is the next token."""

    slot: int
    start: int
    """The chunk's first position: the first entry is of the token after it. Virtual tokens have
    neither entries nor, here, positions."""
    tokens: PackedLogprobs


TOO_EARLY = 425
"""HTTP's number for a thing that may be tried again later."""


class RowFailure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    row: int
    reason: str
    status: int
    """HTTP status: 400 where the request is to blame, 500 or 503 where it is the server.
    ``TOO_EARLY`` goes to no client: the grammar is not compiled yet, and the slot has no token
    until its sequence has taken one anew."""


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=43, gc=False):
    epoch: int
    step: int
    tokens: bytes
    """int32 sampled ids, in the order of the rows above, little endian."""
    bad_rows: list[int]
    """Rows whose logits, as the model made them, were not finite; their token means nothing, nor do
    the K and V that they were computed from."""
    seconds: float
    """Time that the worker spent on the step."""
    logprobs: list[SampledLogprobs] = []
    """Logprobs of the rows whose slots ask for them."""
    prompt_logprobs: list[ChunkLogprobs] = []
    failures: list[RowFailure] = []
    """Rows whose grammar cannot go on, or not yet, or whose sampling cannot be read; their token
    means nothing."""
    banned_rows: list[int] = []
    """Rows whose logits were finite until the slot's own adjustments banned every token, or made
    one infinite; their token means nothing."""
    counts: bytes = b""
    """How many tokens each row brings, a byte a row: none to ``max_row_tokens``, and no more than
    its block tables have positions for. After a row that brings none, the next step computes the
    slot's last token again. Empty: one each, as always where ``max_row_tokens`` is 1."""
    pooled: list[RowPooled] = []
    """Results of the rows whose slots have a task; the token of such a row means nothing."""
    drafted: bytes = b""
    """How many tokens of each row were drafted, a byte a row: all it brings but the last were
    accepted. Empty: none."""


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=45, gc=False):
    """Scheduler → every worker of the engine: read an adapter, while steps go on."""

    name: str
    folder: str


class AdapterLoaded(msgspec.Struct, frozen=True, array_like=True, tag=46, gc=False):
    """Worker → scheduler: the answer to ``LoadAdapter``. From now on it can be brought into a
    place of the device."""

    name: str
    folder: str
    digest: str = ""
    """Empty: it is not loaded."""
    reason: str = ""
    """Why not."""
    virtual_tokens: int = 0
    """See ``Adapter``."""


class BringAdapter(msgspec.Struct, frozen=True, array_like=True, tag=48, gc=False):
    """Scheduler → every worker: bring an adapter that is loaded into a place of the device, while
    steps go on."""

    number: int
    """Which bringing this is; the same where it is asked for again."""
    digest: str
    keeps: list[str]
    """What must stay in its place, or is coming. No slot of a later plan has any other."""


class AdapterBrought(msgspec.Struct, frozen=True, array_like=True, tag=49, gc=False):
    """Worker → scheduler: the answer to ``BringAdapter``. From now on slots may have it."""

    number: int
    digest: str
    reason: str = ""
    """Why it is in no place; empty: it is in one."""


class NameAdapters(msgspec.Struct, frozen=True, array_like=True, tag=50, gc=False):
    """Scheduler → every worker: these are the engine's adapters from now on. A worker tells it to
    the next scheduler, as ``Attached.adapters``."""

    adapters: list[Adapter]


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag=47, gc=False):
    """Scheduler → every worker: no slot of a later plan has this adapter."""

    digest: str


class StepFailed(msgspec.Struct, frozen=True, array_like=True, tag=44, gc=False):
    """The step raised, or could not begin. The worker drops all slots and waits for a full plan."""

    epoch: int
    step: int
    reason: str
    missed: bool = False
    """Whether a plan ahead of it did not come: then nothing in the step is to blame."""
