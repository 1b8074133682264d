"""Choices between kernels that were measured: their lines, and who has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.kernels.kernel_table import Choice, chosen, read_choice, trying, use_choices

CHOICE = Choice("few_rows", (4096, 1024, 8), (1, 4, 8, 8))


@pytest.fixture(autouse=True)
def _none_are_left() -> Iterator[None]:
    yield
    use_choices([])


@pytest.mark.parametrize(
    "line",
    [
        "few_rows 4096x1024x8 = 1 4 8 8", "few_int4 6144x4096x16 = 1 8 4 2 3",
        "tiled_fp8 4096x4096x64 = 64 64 4 4 1", "hopper_rows 1024x3072 = 5 64",
        "compressed_rows 4096x12288 = 0 0",
    ],
)  # fmt: skip
def test_a_line_is_read_and_written_alike(line: str) -> None:
    assert str(read_choice(line)) == line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("few_rows 4096x1024x8", "a choice is TABLE SIZES = NUMBERS"),
        ("fewest 1x2x3 = 1 2 3 4", "no such table; there are few_rows, gated_few_rows"),
        ("few_rows 4096x1024 = 1 4 8 8", "few_rows has outputsxinputsxrows = blocks warps depth"),
        ("few_rows 4096x1024x8 = 1 3 8 8", "warps is a power of two"),
        ("few_rows 4096x1024x8 = 0 4 8 8", "blocks goes from 1 to 256"),
        ("hopper_rows 1024x3072 = 64 5", "rows go from 1 to 128 at most, or are 0 0"),
        ("hopper_rows 1024x3072 = 1 256", "rows go from 1 to 128"),
    ],
)
def test_a_line_that_is_no_choice_is_refused_by_name(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        read_choice(line)
    assert repr(line) in str(refused.value)


def test_kernels_have_the_choices_that_are_used_and_a_thread_the_one_that_it_tries() -> None:
    use_choices([CHOICE])
    tried = CHOICE._replace(numbers=(2, 4, 8, 4))
    of_others: list[object] = []
    with trying(tried):
        assert chosen("few_rows", 4096, 1024, 8) == (2, 4, 8, 4)
        thread = threading.Thread(target=lambda: of_others.append(chosen(*CHOICE[:1], *CHOICE[1])))
        thread.start()
        thread.join()
    assert of_others == [(1, 4, 8, 8)]
    assert chosen("few_rows", 4096, 1024, 8) == (1, 4, 8, 8)
    assert chosen("few_rows", 4096, 1024, 16) is None


def test_a_product_is_cut_as_was_chosen_where_it_can_be() -> None:
    few_rows_linear = pytest.importorskip("penstock.kernels.gpu.few_rows_linear")
    usual = few_rows_linear.shape_for(4096, 1024, 3, False)
    use_choices([Choice("few_rows", (4096, 1024, 8), (4, 8, 4, 4))])
    assert few_rows_linear.shape_for(4096, 1024, 3, False) == (4, 8, 4, 4)
    assert few_rows_linear.shape_for(4096, 1024, 9, False) != (4, 8, 4, 4)
    use_choices([Choice("few_rows", (4096, 1024, 8), (1, 64, 8, 8))])  # 1,024 are no 64 parts
    assert few_rows_linear.shape_for(4096, 1024, 3, False) == usual
