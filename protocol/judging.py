"""How a language model is asked to judge a pair of texts, as its folder says.

A folder whose ``modules.json`` has a ``LogitScore`` names the two tokens that are compared. The
words around the pair are those of its chat template where that renders messages of the roles
``query`` and ``document``, as sentence-transformers' ``CrossEncoder`` sends them; else those of
Qwen3-Reranker's model card, for that model alone: other rerankers were trained with other words.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_json

JUDGED = ["no", "yes"]
"""What a language model that is asked to judge a pair may answer."""
MODULES = "modules.json"
JudgeForm = Literal["", "template", "qwen3"]
"""Whose words stand around a pair: nobody's, the chat template's, or Qwen3-Reranker's."""
_ROLES = tuple(re.compile(rf"""(['"]){role}\1""") for role in ("query", "document"))
_QWEN3 = re.compile(r"qwen3[-_.]?reranker", re.IGNORECASE)


def judge_tokens(folder: Path) -> list[int]:
    """The tokens that say no and yes, where ``modules.json`` has a ``LogitScore``; else none.
    Raises ``BadModelFolder``."""
    path = folder / MODULES
    listed = read_json(path) if path.is_file() else None
    for one in listed if isinstance(listed, list) else ():
        name = str(one.get("type", "")) if isinstance(one, dict) else ""
        if name.rpartition(".")[2] == "LogitScore":
            place = within(folder, str(one.get("path", ""))) / "config.json"
            config = read_json(place)
            config = config if isinstance(config, dict) else {}
            no, yes = config.get("false_token_id"), config.get("true_token_id")
            if type(no) is not int or type(yes) is not int or min(no, yes) < 0:
                raise BadModelFolder(
                    f"{place}: LogitScore needs two token ids, of which true_token_id is {yes!r} "
                    f"and false_token_id {no!r}"
                )
            return [no, yes]
    return []


def judge_form(info: ModelInfo) -> JudgeForm:
    """Raises ``BadModelFolder`` where nothing says how the model is asked."""
    if all(role.search(_template(info.folder)) for role in _ROLES):
        return "template"
    if info.architecture == "Qwen3ForCausalLM" and info.is_named(_QWEN3):
        return "qwen3"
    raise BadModelFolder(
        f"{info.folder}: nothing says how this model is asked to judge a pair: it is no "
        "Qwen3-Reranker by its folder's name or config.json's _name_or_path, and it has no chat "
        "template for the roles query and document; put one into chat_template.jinja"
    )


def within(folder: Path, place: str) -> Path:
    """A folder that ``modules.json`` names. Raises ``BadModelFolder``."""
    if Path(place).is_absolute() or ".." in Path(place).parts:
        raise BadModelFolder(f"{folder / MODULES}: the path {place!r} leads out of the folder")
    return folder / place


def _template(folder: Path) -> str:
    """The chat template's text; empty: there is none. The tokenizer says what is wrong with it."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    path = folder / "tokenizer_config.json"
    config: Any = read_json(path) if path.is_file() else None
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else ""
