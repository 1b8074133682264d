"""Sampling parameters as fields of a body, under the names that its API has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from penstock.protocol.declared import Declared
from penstock.protocol.sampling import PARAMETERS


def sampling_struct(name: str, fields: Mapping[str, str]) -> type[Declared]:
    """A struct with a field for each of ``fields``, which has the sampling parameter that it is;
    empty: the one of the same name. ``null`` is left out."""
    made: Any = msgspec.defstruct(
        name,
        [(field, PARAMETERS[of or field].type | None, None) for field, of in fields.items()],
        bases=(Declared,),
        module=__name__,
        kw_only=True,
    )
    return cast(type[Declared], made)


def sampling_values(body: Declared, fields: Mapping[str, str]) -> dict[str, Any]:
    """What a body gives of ``fields``, by the parameters' own names."""
    found = {of or field: getattr(body, field) for field, of in fields.items()}
    return {name: value for name, value in found.items() if value is not None}
