"""What a folder says that its model makes of prompts, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.config.fields import ModelConfig
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.protocol.pooling import Pooling, read_pooling

RERANKER = "{% if m.role == 'query' %}{% elif m.role == \"document\" %}{% endif %}"


def pooling(folder: Path, architecture: str, flags: dict[str, Any], **config: Any) -> Pooling:
    info = ModelInfo(folder, architecture, 99, 64, "float32", [], {}, config)
    return read_pooling(info, ModelConfig(**flags))


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "kind", ["BertForSequenceClassification", "Qwen3ForSequenceClassification"]
)
def test_a_classifier_refuses_pooling_by_name(kind: str, tmp_path: Path) -> None:
    with pytest.raises(BadModelFolder, match=r"--pooling mean.*leave the flag out"):
        pooling(tmp_path, kind, {"pooling": "mean"})
    assert pooling(tmp_path, kind, {}).tasks == ["classify"]
    assert pooling(tmp_path, kind, {"pooling": "mean", "task": "embed"}).kind == "mean"


def test_only_known_rerankers_are_asked_in_the_words_of_qwen3_reranker(tmp_path: Path) -> None:
    score = {"task": "score"}
    named = write(tmp_path / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshot")
    assert pooling(named, "Qwen3ForCausalLM", score).judge == "qwen3"
    plain = write(tmp_path / "plain")
    origin = {"_name_or_path": "Qwen/Qwen3-Reranker-4B"}
    assert pooling(plain, "Qwen3ForCausalLM", score, **origin).judge == "qwen3"
    for folder, architecture in ((plain, "Qwen3ForCausalLM"), (named, "GemmaForCausalLM")):
        with pytest.raises(BadModelFolder, match="nothing says how this model is asked to judge"):
            pooling(folder, architecture, score)
    with pytest.raises(BadModelFolder, match="--pooling mean"):
        pooling(named, "Qwen3ForCausalLM", score | {"pooling": "mean"})


def test_a_template_for_query_and_document_is_taken(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config={"chat_template": RERANKER})
    assert pooling(folder, "GemmaForCausalLM", {"task": "score"}).judge == "template"
    (folder / "chat_template.jinja").write_text("{{ messages }}")  # this one counts
    with pytest.raises(BadModelFolder, match="no chat template for the roles query and document"):
        pooling(folder, "GemmaForCausalLM", {"task": "score"})


def test_what_a_logit_score_lacks_is_named_where_it_lacks(tmp_path: Path) -> None:
    modules = [{"path": "1_LogitScore", "type": "sentence_transformers.modules.LogitScore"}]
    folder = write(tmp_path, modules=modules, **{"1_LogitScore__config": {"true_token_id": 5}})
    message = r"1_LogitScore/config.json: LogitScore needs .* true_token_id is 5 and false_.* None"
    with pytest.raises(BadModelFolder, match=message):
        pooling(folder, "Qwen3ForCausalLM", {})
    write(folder, **{"1_LogitScore__config": {"true_token_id": 5, "false_token_id": 4}})
    with pytest.raises(BadModelFolder, match="rates pairs of texts and makes no vectors"):
        pooling(folder, "Qwen3ForCausalLM", {"task": "embed"})
    with pytest.raises(
        BadModelFolder, match=r"modules.json: a BertModel does not do the task 'sco"
    ):
        pooling(folder, "BertModel", {})


def test_layers_see_both_ways_only_where_the_text_does(tmp_path: Path) -> None:
    for said, encoder in ((True, True), ("all", True), ("vision", False), (None, False)):
        found = pooling(tmp_path, "Gemma3TextModel", {}, use_bidirectional_attention=said)
        assert found.encoder is encoder


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM", "SomethingElse"])
def test_language_models_generate_unless_they_are_asked_for_more(kind: str, tmp_path: Path) -> None:
    found = pooling(tmp_path, kind, {})
    assert (found.tasks, found.generates) == ([], True)
    if kind != "SomethingElse":
        assert pooling(tmp_path, kind, {"task": "generate"}).generates
    assert pooling(tmp_path, kind, {"task": "embed"}).tasks == ["embed"]


def test_vectors_are_cut_as_config_json_or_the_model_s_card_says(tmp_path: Path) -> None:
    plain, both_ways = tmp_path / "plain", {"use_bidirectional_attention": True}
    qwen3 = write(tmp_path / "models--Qwen--Qwen3-Embedding-0.6B" / "snapshots" / "97b0c614be")
    gemma = write(tmp_path / "google" / "embeddinggemma-300m")
    embed = {"task": "embed"}
    for folder, architecture, config, said in (
        (plain, "BertModel", {"matryoshka_dimensions": [256, 128, "x"]}, "128, 256"),
        (plain, "BertModel", {"is_matryoshka": True}, "1 or more"),
        (plain, "Qwen3ForCausalLM", {}, ""),
        (plain, "Gemma3TextModel", both_ways, ""),
        (plain, "Qwen3ForCausalLM", {"_name_or_path": "Qwen/Qwen3-Embedding-8B"}, "32 or more"),
        (qwen3, "Qwen3ForCausalLM", {}, "32 or more"),
        (qwen3, "Qwen3ForCausalLM", {"matryoshka_dimensions": [64]}, "64"),
        (gemma, "Gemma3TextModel", both_ways, "128, 256, 512, 768"),
        (gemma, "LlamaModel", {}, ""),
    ):
        assert str(pooling(folder, architecture, embed, **config).lengths) == said
    flags = {**embed, "allow_dimensions": True}
    assert 1 in pooling(plain, "Qwen3ForCausalLM", flags).lengths


def test_pooling_without_a_prompt_is_refused_where_there_is_a_prompt(tmp_path: Path) -> None:
    pooled = {"pooling_mode_cls_token": True, "include_prompt": False}
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    empty = {"prompts": {"query": "", "document": ""}}  # as Granite's encoders have it
    folder = write(
        tmp_path, modules=modules, config_sentence_transformers=empty,
        **{"1_Pooling__config": pooled},
    )  # fmt: skip
    assert pooling(folder, "ModernBertModel", {}).kind == "cls"
    write(folder, config_sentence_transformers={"prompts": {"query": "query: "}})
    with pytest.raises(BadModelFolder, match="include_prompt is false"):
        pooling(folder, "ModernBertModel", {})
