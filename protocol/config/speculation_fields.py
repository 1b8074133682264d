"""The fields of speculative decoding."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    speculative: Annotated[
        Literal["auto", "off", "suffix", "ngram", "eagle3", "draft-model"],
        Meta(
            description="Where drafts of tokens come from: suffix, what a text or earlier outputs "
            "of its tenant had after the longest same tokens; ngram, what a text had after its "
            "last three tokens; eagle3 and draft-model, that of --speculative-model. auto is "
            "suffix where that goes with all else that is asked for, and off elsewhere."
        ),
    ] = "off"
    speculative_model: Annotated[
        str,
        Meta(
            description="Folder of the EAGLE-3 head or the draft model, for --speculative eagle3 "
            "or draft-model."
        ),
    ] = ""
    speculative_tokens: Annotated[
        int, Meta(ge=1, le=31, description="Most drafted tokens of a sequence in one step.")
    ] = 10
    speculative_history: Annotated[
        int,
        Meta(
            ge=0,
            le=2**27,
            description="Tokens of finished outputs that suffix drafts from, over all tenants; "
            "16 to 20 bytes each.",
        ),
    ] = 4_000_000

    @property
    def drafts(self) -> bool:
        """Whether drafts were asked for by name."""
        return self.speculative not in ("auto", "off")

    @property
    def by_model(self) -> bool:
        """Whether they are those of another folder."""
        return self.speculative in ("eagle3", "draft-model")
