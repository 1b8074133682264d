"""What a worker's memory is used for, as data, and as the table that people read.

The same account is made twice: by ``penstock plan`` before anything is loaded, from the model's
specification, and by a worker at its start, from what it has allocated and measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.memory import EXTRA_BLOCKS

GIB = 1 << 30
_MIB = 1 << 20
_KIB = 1 << 10
_DIGITS = {"GiB": 2, "MiB": 1}
TOLERANCE = 0.02
"""What is counted and what is used may differ by this share."""
_SMALL = 4 * GIB
"""An account of less than this is shown in MiB."""


class MemoryPart(msgspec.Struct, frozen=True):
    """What something takes."""

    name: str
    num_bytes: int
    note: str = ""


class MemoryAccount(msgspec.Struct, frozen=True):
    """All that a worker takes of its device's memory, before its first step and in any."""

    device: str
    total: int
    """Bytes of the device; on a CPU those that are free."""
    usable: int
    """Bytes that the worker may use, …"""
    limit: str
    """… and what says so."""
    parts: list[MemoryPart]
    """All but KV memory."""
    block_bytes: int
    """K and V of one block; see ``block_bytes``."""
    capacity: EngineSizes | None = None
    """``None``: no KV memory fits."""
    in_use: int | None = None
    """Bytes of the device that are in use after the start, by all; ``None``: nobody has looked."""
    beside_it: MemoryPart | None = None
    """What is taken beside the worker for its end or its model's sleep; of nothing that it may
    use."""

    @property
    def sizes(self) -> EngineSizes:
        """Raises ``ValueError`` where no KV memory was planned."""
        if self.capacity is None:
            raise ValueError("no KV memory was planned")
        return self.capacity

    @property
    def beside(self) -> int:
        """Bytes of all but KV memory."""
        return sum(part.num_bytes for part in self.parts)

    def bytes_of(self, name: str) -> int:
        """Of the parts of that name."""
        return sum(part.num_bytes for part in self.parts if part.name == name)

    @property
    def left(self) -> int:
        """Bytes left for KV memory; negative where the rest does not fit."""
        return self.usable - self.beside

    @property
    def kv_bytes(self) -> int:
        if self.capacity is None:
            return 0
        return (self.capacity.num_blocks + EXTRA_BLOCKS) * self.block_bytes

    @property
    def counted(self) -> int:
        """Bytes of everything together."""
        return self.beside + self.kv_bytes

    @property
    def overdrawn(self) -> bool:
        """Whether more is in use than was counted, by more than can be passed over."""
        return self.in_use is not None and self.in_use > (1 + TOLERANCE) * self.counted

    @property
    def sequences(self) -> float:
        """Sequences of ``max_model_len`` that KV memory holds at once."""
        sizes = self.capacity
        return sizes.num_blocks / sizes.sequence_blocks(sizes.max_model_len) if sizes else 0.0

    @property
    def kv_tokens(self) -> int:
        """See ``EngineSizes.all_kv_tokens``."""
        return 0 if self.capacity is None else self.capacity.all_kv_tokens


def table(account: MemoryAccount) -> list[str]:
    """The account in aligned lines."""
    rows = [(part.name, part.num_bytes, part.note) for part in account.parts]
    rows.append(("KV memory", account.kv_bytes, _kv_note(account)))
    rows.append(("unused", account.usable - account.counted, ""))
    rows.append(("usable", account.usable, f"of {shown_bytes(account.total)} on {account.device}, "
                 f"{account.limit}"))  # fmt: skip
    if (later := account.beside_it) is not None:
        rows.append((later.name, later.num_bytes, later.note))
    unit, name = (_MIB, "MiB") if account.counted < _SMALL else (GIB, "GiB")
    digits = _DIGITS[name]
    shown = [(part, f"{amount / unit:,.{digits}f}", note) for part, amount, note in rows]
    names = max(len(row[0]) for row in shown)
    sizes = max(len(row[1]) for row in shown)
    lines = [f"{row[0]:{names}}  {row[1]:>{sizes}} {name}  {row[2]}".rstrip() for row in shown]
    return [*lines, *_reach(account)]


def _kv_note(account: MemoryAccount) -> str:
    sizes = account.capacity
    if sizes is None:
        return f"too little is left; a block of it is {shown_bytes(account.block_bytes)}"
    count = len(sizes.groups)
    groups = f", {count} groups of layers" if count > 1 else ""
    token = account.block_bytes * sizes.num_blocks / account.kv_tokens
    return (
        f"{account.kv_tokens:,} tokens: {sizes.num_blocks:,} blocks of {sizes.block_size}{groups}, "
        f"{shown_bytes(token)} a token"
    )


def _reach(account: MemoryAccount) -> Iterator[str]:
    if account.in_use is not None:
        more = account.in_use - account.counted
        yield (
            f"in use after the start {shown_bytes(account.in_use)}, "
            f"{shown_bytes(abs(more))} {'more' if more > 0 else 'less'} than counted"
        )
    sizes = account.capacity
    if sizes is not None:
        yield (
            f"longest context {sizes.max_model_len:,} tokens; {account.sequences:,.1f} of that "
            f"length at once, {sizes.max_num_seqs} sequences at most"
        )


def shown_bytes(num_bytes: float) -> str:
    """``1.5 GiB``."""
    for unit, name in ((GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} bytes"


def dtype_name(dtype: object) -> str:
    """Of a torch type, as ``--dtype`` names it."""
    return str(dtype).removeprefix("torch.")


def weights_part(parameters: int, num_bytes: int, dtype: str) -> MemoryPart:
    """dtype: as ``--dtype`` names it."""
    return MemoryPart("weights", num_bytes, shown_parameters(parameters, dtype))


def shown_parameters(parameters: int, dtype: str) -> str:
    """``8.19 B parameters in bfloat16``."""
    size = f"{parameters / 1e9:.2f} B" if parameters >= 1e7 else f"{parameters / 1e6:.2f} M"
    return f"{size} parameters in {dtype}"


def merged(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """Parts of one name as one, in the order of the first of each; empty ones are left out."""
    found: dict[str, MemoryPart] = {}
    for part in parts:
        before = found.get(part.name)
        total = part.num_bytes + (before.num_bytes if before else 0)
        notes = [one.note for one in (before, part) if one is not None and one.note]
        found[part.name] = MemoryPart(part.name, total, ", ".join(notes))
    return [part for part in found.values() if part.num_bytes]
