"""What ``penstock plan`` says of prefill and decode in engines of their own."""

from __future__ import annotations

from penstock.protocol.config import Config
from penstock.services.worker.memory_account import shown_bytes


def engines_with_roles(config: Config) -> list[str]:
    """Lines for a server whose engines have roles; none for any other. What is planned is the
    memory of one worker, and each engine has one."""
    prefill, decode = config.launch.prefill_engines, config.launch.decode_engines
    if not prefill or not decode:
        return []
    line = f"Each of {prefill + decode} engines takes this. For prompts: {_numbered(0, prefill)}; "
    line += f"to go on with them: {_numbered(prefill, decode)}."
    if kept := config.cache.kv_tier_memory_bytes:
        line += f" The keeper between them takes {shown_bytes(kept).strip()} more."
    return ["", line]


def _numbered(first: int, count: int) -> str:
    last = first + count - 1
    return f"engine {first}" if count == 1 else f"engines {first} to {last}"
