"""What is said of a wrong name, a wrong type, and a number with a suffix."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from penstock.protocol.config.foreign import FOREIGN_SETTINGS
from penstock.protocol.config.resolve import fields, flag_of
from penstock.protocol.config.spelled_numbers import spelled_number
from penstock.protocol.foreign_parameters import FOREIGN_PARAMETERS
from penstock.protocol.plain_errors import plain_error
from penstock.protocol.sampling import PARAMETERS
from penstock.protocol.suggestions import closest


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("prot", "port"),
        ("max-modellen", "max_model_len"),
        ("Temprature", "temperature"),
        ("temperature" * 100, None),
        ("xyzzy", None),
        ("", None),
    ],
)
def test_the_closest_name_is_found_where_one_is_close(name: str, meant: str | None) -> None:
    assert closest(name, ["port", "max_model_len", "temperature", "top_p"]) == meant


def test_a_beginning_comes_ahead_of_what_is_alike_if_one_name_alone_has_it() -> None:
    known = ["max_seconds", "max_concurrency", "sweep_concurrency"]
    assert closest("max_conc", known) == "max_concurrency"
    assert closest("max_conc", [*known, "max_conclusion"]) == "max_seconds"


def test_a_suggestion_is_spelled_as_the_reader_must_write_it() -> None:
    known = list(fields())
    spelled = FOREIGN_SETTINGS.advice("max-seq-len", known, flag_of)
    assert spelled == ": use --max-model-len"
    assert FOREIGN_SETTINGS.advice("max_seq_len", known) == ": use max_model_len"
    assert FOREIGN_SETTINGS.advice("frontend", known, flag_of) == ": did you mean --frontends?"
    assert FOREIGN_SETTINGS.advice("xyzzy", known) == ""


def test_what_foreign_settings_are_called_here_is_there() -> None:
    assert set(FOREIGN_SETTINGS.renamed.values()) <= fields().keys()
    foreign = FOREIGN_SETTINGS.renamed.keys() | FOREIGN_SETTINGS.explained.keys()
    assert foreign & fields().keys() == set()
    assert FOREIGN_SETTINGS.renamed.keys() & FOREIGN_SETTINGS.explained.keys() == set()
    text = " ".join(FOREIGN_SETTINGS.explained.values())
    for word in text.replace(",", " ").replace(":", " ").split():
        if word.startswith("--") and word != "--revision":  # that one is of `hf download`
            name = word.strip("-.;").removeprefix("no-").replace("-", "_")
            assert name in fields(), word


@pytest.mark.parametrize(
    ("flag", "here"),
    [
        ("--otlp-traces-endpoint", "--otel-traces"),
        ("--swap-space", "--kv-tier-memory-bytes"),
        ("--kv-transfer-config", "--prefill-engines"),
        ("--disaggregation-mode", "--prefill-engines"),
        ("--gpu-memory", "--gpu-memory-utilization"),
        ("--max-num-batched", "--max-num-batched-tokens"),
    ],
)
def test_a_flag_of_another_server_or_its_beginning_leads_to_the_one_here(
    flag: str, here: str
) -> None:
    assert here in FOREIGN_SETTINGS.advice(flag.removeprefix("--"), list(fields()), flag_of)


def test_a_beginning_that_several_names_have_is_no_name() -> None:
    assert closest("tls", ["tls_cert_and_chain", "tls_key_and_password"]) is None
    assert closest("p", ["published_host"]) is None


def test_what_foreign_parameters_are_called_here_is_there() -> None:
    assert set(FOREIGN_PARAMETERS.renamed.values()) <= PARAMETERS.keys()
    foreign = FOREIGN_PARAMETERS.renamed.keys() | FOREIGN_PARAMETERS.explained.keys()
    assert foreign & PARAMETERS.keys() == set()
    assert FOREIGN_PARAMETERS.renamed.keys() & FOREIGN_PARAMETERS.explained.keys() == set()


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("x", int, "Expected a whole number"),
        (1.5, int | None, "Expected a whole number"),
        ("x", float | None, "Expected a number"),
        (1, bool, "Expected true or false"),
        (1.5, str | int | None, "Expected a whole number or a string"),
        ("x", list[int], "Expected an array"),
        (0, Annotated[int, Meta(ge=1)] | None, "Expected a whole number >= 1"),
        ([1, "x"], list[int], "Expected a whole number, got a string - at `$[1]`"),
        ({"x": 1}, dict[int, int], "at `key` in `$`"),
    ],
)
def test_a_wrong_type_is_told_in_plain_words(value: object, kind: object, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, kind)  # type: ignore[call-overload]
    assert words in plain_error(caught.value)
    assert "null" not in plain_error(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("32k", 32_000),
        ("32K", 32_768),
        ("1m", 1_000_000),
        ("1M", 2**20),
        ("4G", 2**32),
        ("2g", 2 * 10**9),
        ("1t", 10**12),
        ("1T", 2**40),
        ("1.5k", 1500),
        ("0.5K", 512),
        ("25.6k", 25_600),
    ],
)
def test_a_whole_number_may_have_a_suffix(text: str, number: int) -> None:
    assert spelled_number(text) == number


@pytest.mark.parametrize(
    "text", ["k", "32", "", "32kk", "32 k", "-1k", "1e3k", ".5k", "1.k", "32b", "1_0k", "\u0661k"]
)
def test_what_spells_no_number_with_a_suffix_is_left_alone(text: str) -> None:
    assert spelled_number(text) == text


def test_a_fraction_that_is_no_whole_number_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="whole number"):
        spelled_number("1.2345k")
