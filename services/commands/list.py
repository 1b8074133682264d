"""``penstock list``: the models in the hub's cache on this disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.commands.parser import CommandParser
from penstock.services.commands.printable import one_line
from penstock.services.commands.table import table

BY_TRANSFORMERS = "by transformers"


def parser() -> CommandParser:
    parser = CommandParser(
        "list",
        "[flags]",
        "List the models in the hub's cache on this disk: their size, architecture, and whether "
        f"they can be served: by code of Penstock's own (yes), {BY_TRANSFORMERS}' code where it "
        "has the architecture, or why not.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON array, sizes in bytes")
    return parser


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parsed = parser().parse_args(arguments)
    from penstock.services.commands.hub_cache import cache_folder, cached_models, gigabytes

    found = [
        {
            "name": model.name,
            "size": model.size,
            **_judged(model.snapshot),
            "folder": str(model.snapshot or model.folder),
        }
        for model in cached_models()
    ]
    if parsed.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    elif found:
        rows = [
            (one_line(one["name"]), gigabytes(one["size"]), one["architecture"], one["served"])
            for one in found
        ]
        print(table(("model", "size", "architecture", "served"), rows, ("size",)))
    else:
        print(
            f"no model is in the hub's cache {cache_folder()}; `penstock pull ORG/NAME` fetches one"
        )
    return 0


def _judged(snapshot: Path | None) -> dict[str, Any]:
    """Architecture, and whether it can be served or why not."""
    from penstock.protocol.config import ModelConfig
    from penstock.protocol.model_hub import missing_files
    from penstock.protocol.model_info import BadModelFolder, read_json, read_model_info
    from penstock.protocol.pooling import read_pooling
    from penstock.services.worker.encoders.families import encoder_specification
    from penstock.services.worker.models.registry import is_native

    if snapshot is None:
        return {"architecture": "", "served": "no: the download has just begun"}
    architecture = ""
    try:
        config = read_json(snapshot / "config.json")
        named = config.get("architectures") if isinstance(config, dict) else None
        architecture = one_line(str(named[0])) if named else ""
        if gone := missing_files(snapshot, weights=True):
            return {"architecture": architecture, "served": f"no: without {', '.join(gone)}"}
        info = read_model_info(snapshot)
        encoder = read_pooling(info, ModelConfig()).encoder
        if encoder:
            encoder_specification(info)
    except BadModelFolder as error:
        reason = one_line(str(error)).replace(f"{snapshot}/", "")
        return {"architecture": architecture, "served": f"no: {reason}"}
    if encoder or is_native(info):
        return {"architecture": architecture, "served": "yes"}
    # A causal language model, which transformers computes if it has the code.
    causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    return {"architecture": architecture, "served": BY_TRANSFORMERS if causal else "no"}
