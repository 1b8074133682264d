"""Which kernels compute a decoder's layers, and what is said of them."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from support.worker.sharp_model import CONFIG as SMALL

from penstock.kernels.kernel_table import Choice, use_choices
from penstock.services.worker.gpu import layer_products, row_linears
from penstock.services.worker.gpu.kernel_choice import KernelChoice
from penstock.services.worker.gpu.layer_products import (
    BoundedProducts,
    FusedProducts,
    LayerProducts,
    LibraryProducts,
    choose_gated,
    choose_products,
    most_fused_rows,
)
from penstock.services.worker.gpu.workspace import make_workspace
from penstock.services.worker.models.dense import DenseWeights
from penstock.services.worker.models.dense_form import allocate_dense

CPU = torch.device("cpu")
HOPPER = "penstock.kernels.gpu.rows_linear_hopper"
HOPPER_COMPRESSED = "penstock.kernels.gpu.compressed_linear_hopper"
HOPPER_GATED = "penstock.kernels.gpu.gated_linear_hopper"


def weights_of(dtype: torch.dtype, **sizes: int) -> DenseWeights:
    return allocate_dense(msgspec.structs.replace(SMALL, **sizes), dtype, CPU)


def chosen(dtype: torch.dtype, **sizes: int) -> KernelChoice[BoundedProducts | None]:
    config = msgspec.structs.replace(SMALL, **sizes)
    space = make_workspace(config, 16, 4, dtype, CPU)
    return choose_products(weights_of(dtype, **sizes), space, 1e-6)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A Hopper GPU, and the linear layers that are compiled for it; nothing is compiled."""
    module = pytest.importorskip(HOPPER)
    compiled: list[dict[str, Any]] = []

    class Compiled:
        def __init__(self, *arguments: object, **options: object) -> None:
            compiled.append(options)

    monkeypatch.setattr(module, "HopperLinear", Compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_hopper_four_linear_layers_have_the_kernel_for_some_rows(
    dtype: torch.dtype, hopper: list[dict[str, Any]]
) -> None:
    choice = chosen(dtype)
    assert choice.summary == "Gluon kernel for Hopper"
    assert choice.kernels is not None
    first, last = layer_products.HOPPER_ROWS
    # Products with norms inside, which are faster for the fewest rows, take no fp16.
    assert choice.kernels.bounds == (first if dtype == torch.bfloat16 else 1, last)
    assert [(linear["gated"], linear["divided"]) for linear in hopper] == [
        (False, False), (False, True), (True, False), (False, True),
    ]  # fmt: skip


def test_the_numbers_of_rows_that_were_measured_take_the_place_of_the_usual_ones(
    hopper: list[dict[str, Any]],
) -> None:
    table = ("hopper_rows", (SMALL.hidden_size, SMALL.intermediate_size))
    try:
        use_choices([Choice(*table, (9, 32))])
        kernels = chosen(torch.bfloat16).kernels
        assert kernels is not None and kernels.bounds == (9, 32)
        use_choices([Choice(*table, (0, 0))])
        assert chosen(torch.bfloat16).reason.endswith("for any number of rows, says --kernel-table")
    finally:
        use_choices([])
    assert len(hopper) == 4


def test_norms_of_what_is_added_have_the_kernel_from_one_row_on(
    hopper: list[dict[str, Any]],
) -> None:
    choice = chosen(torch.bfloat16, output_norms=True)
    assert choice.kernels is not None
    assert choice.kernels.bounds == (1, layer_products.HOPPER_ROWS[1])
    assert len(hopper) == 4


@pytest.mark.parametrize("fails", [False, True], ids=["compressed", "failing"])
def test_compressed_weights_have_their_kernel_and_plain_ones_theirs_where_it_fails(
    fails: bool, hopper: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, calls = pytest.importorskip(HOPPER_COMPRESSED), []

    class Compressed:
        def __init__(self, *arguments: object, **options: object) -> None:
            if fails:
                raise RuntimeError("no such layout")

        def __call__(self, layer: int, rows: int, out: torch.Tensor) -> torch.Tensor:
            calls.append((layer, rows))
            return out

    monkeypatch.setattr(module, "CompressedLinear", Compressed)
    space = make_workspace(SMALL, 16, 4, torch.bfloat16, CPU)
    weights = weights_of(torch.bfloat16)
    weights.lm_head.compressed = cast(Any, "weight")
    choice = choose_products(weights, space, 1e-6, compressed=True)
    assert choice.summary == "Gluon kernel for Hopper"
    assert choice.kernels is not None
    assert choice.kernels.compressed != fails
    assert (choice.kernels.head is None) == fails
    assert len(hopper) == (4 if fails else 0)
    if not fails:
        choice.kernels.qkv(1, 7)
        assert calls == [(1, 7)]


@pytest.mark.parametrize(
    ("dtype", "sizes", "words"),
    [
        (torch.float32, {}, "takes bfloat16 and float16, not float32"),
        (torch.bfloat16, {"intermediate_size": 416}, "not 416 x"),
        (torch.bfloat16, {"hidden_size": 96}, "x 96"),
    ],
    ids=str,
)
def test_layers_that_the_kernel_cannot_compute_have_the_others(
    dtype: torch.dtype, sizes: dict[str, int], words: str, hopper: list[dict[str, Any]]
) -> None:
    choice = chosen(dtype, **sizes)
    assert choice.kernels is None
    assert choice.summary.startswith("library: the kernel for Hopper takes ")
    assert words in choice.reason
    assert not hopper


def test_a_kernel_that_cannot_be_compiled_is_not_taken_and_the_summary_says_why(
    hopper: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("no such layout")

    monkeypatch.setattr(f"{HOPPER}.HopperLinear", fail)
    choice = chosen(torch.bfloat16)
    assert choice.kernels is None
    assert choice.reason == "the kernel for Hopper failed: RuntimeError: no such layout"


@pytest.mark.usefixtures("hopper")
def test_gated_products_of_many_rows_have_a_kernel_where_it_can_compute_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, compiled = pytest.importorskip(HOPPER_GATED), []

    def compile_none(
        x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor, activation: str
    ) -> None:
        compiled.append((x.shape[1], weights[0].shape, out.shape[1]))

    monkeypatch.setattr(module, "HopperGatedLinear", compile_none)
    fits = {"hidden_size": 256, "intermediate_size": 384}
    for dtype, sizes, reason in (
        (torch.bfloat16, fits, ""),
        (torch.float32, fits, "takes bfloat16 and float16, not float32"),
        (torch.bfloat16, fits | {"intermediate_size": 448}, "128 rows of W, not 448 x 256"),
        (torch.bfloat16, fits | {"hidden_size": 96}, "x 96"),
        (torch.bfloat16, fits | {"mlp_bias": True}, "takes no bias"),
    ):
        config = msgspec.structs.replace(SMALL, **sizes)
        weights = allocate_dense(config, dtype, CPU)
        choice = choose_gated(weights, make_workspace(config, 16, 4, dtype, CPU))
        assert reason in choice.reason
        assert bool(reason) == bool(choice.reason)
    assert compiled == [(256, (768, 256), 384)]


@pytest.mark.parametrize(
    ("outs", "rows", "pays"),
    [
        (3072, 512, False), (3072, 1024, False), (3072, 2048, True), (3072, 8192, True),
        (12288, 256, False), (12288, 512, True), (12288, 768, False), (12288, 1000, True),
        (16896, 128, False), (12288, 897, False), (8192, 129, False),
    ],
)  # fmt: skip
def test_gated_products_are_taken_where_nearly_all_programs_have_work_in_each_turn(
    outs: int, rows: int, pays: bool
) -> None:
    module = pytest.importorskip(HOPPER_GATED)
    assert module.pays(rows, outs, multiprocessors=132) == pays


@pytest.mark.parametrize("pays", [False, True])
def test_the_library_leaves_gated_products_to_their_kernel_where_it_pays(pays: bool) -> None:
    if torch.cuda.is_available() and not pays:
        pytest.skip("the interpreter runs where no GPU is")
    calls = []

    class Gated:
        def pays(self, rows: int) -> bool:
            return pays

        def __call__(self, layer: int, rows: int) -> None:
            calls.append((layer, rows))

    space = make_workspace(SMALL, 16, 4, torch.float32, CPU)
    space.normed.fill_(1.0)
    space.gate_up.fill_(float("nan"))
    products = LibraryProducts(weights_of(torch.float32), space, 1e-6, cast(Any, Gated()))
    products.gate_up(1, 5)
    assert calls == ([(1, 5)] if pays else [])
    assert space.gate_up[:5].isnan().all() == pays


def test_without_a_gpu_layers_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen(torch.bfloat16).summary == "library: there is no GPU"


Launch = tuple[str, str]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Kernels that are launched, each with the weights that it reads; nothing is computed."""
    found: list[Launch] = []
    modules = (layer_products, row_linears, torch)
    kernels = (
        ("rms_norm", "add_rms_norm", "add_normed", "gated_product"),
        ("few_rows_linear", "skinny_linear"),
        ("mm", "addmm"),
    )

    def recorder(name: str) -> Any:
        def record(*arguments: Any, out: torch.Tensor | None = None, **options: Any) -> Any:
            given = [each for each in (*arguments, *options.values()) if each is not None]
            labels = [LABELS[p] for p in map(pointer, given) if p in LABELS]
            found.append((name, " ".join(labels)))
            return out

        return record

    for module, names in zip(modules, kernels, strict=True):
        for name in names:
            monkeypatch.setattr(module, name, recorder(name))
    return found


LABELS: dict[int, str] = {}
"""Names of weights, by their addresses."""


def pointer(value: object) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0


def labelled(weights: DenseWeights) -> DenseWeights:
    LABELS.clear()
    for number, layer in enumerate(weights.layers):
        for name, linear in layer.linears._asdict().items():
            LABELS[pointer(linear.weight)] = f"{name}{number}"
            LABELS[pointer(linear.bias)] = f"{name}{number}.bias"
        for name in ("input_norm", "post_norm", "output_norm", "down_norm"):
            LABELS[pointer(getattr(layer, name))] = f"{name}{number}"
    LABELS[pointer(weights.norm)] = "norm"
    LABELS.pop(0, None)
    return weights


def run(products: LayerProducts, rows: int) -> None:
    products.begin(rows)
    for layer in range(2):
        products.qkv(layer, rows)
        products.output(layer, rows)
        products.gate_up(layer, rows)
        products.down(layer, rows)
    products.end(rows)


def test_products_of_the_library_have_kernels_between_them(launches: list[Launch]) -> None:
    weights = labelled(weights_of(torch.bfloat16, qkv_bias=True))
    run(LibraryProducts(weights, make_workspace(SMALL, 16, 4, torch.bfloat16, CPU), 1e-6), 16)
    assert launches == [
        ("rms_norm", "input_norm0"),
        ("addmm", "qkv0.bias qkv0"), ("mm", "output0"), ("add_rms_norm", "post_norm0"),
        ("mm", "up0"), ("gated_product", ""), ("mm", "down0"), ("add_rms_norm", "input_norm1"),
        ("addmm", "qkv1.bias qkv1"), ("mm", "output1"), ("add_rms_norm", "post_norm1"),
        ("mm", "up1"), ("gated_product", ""), ("mm", "down1"), ("add_rms_norm", "norm"),
    ]  # fmt: skip


def test_norms_of_what_is_added_are_in_the_kernel_that_adds_it(launches: list[Launch]) -> None:
    config = msgspec.structs.replace(SMALL, output_norms=True)
    weights = labelled(allocate_dense(config, torch.bfloat16, CPU))
    run(LibraryProducts(weights, make_workspace(config, 16, 4, torch.bfloat16, CPU), 1e-6), 16)
    assert [launch for launch in launches if launch[0].startswith("add_")] == [
        ("add_normed", "output_norm0 post_norm0"), ("add_normed", "down_norm0 input_norm1"),
        ("add_normed", "output_norm1 post_norm1"), ("add_normed", "down_norm1 norm"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("hidden", "rows", "kernel"),
    [(512, 1, "few_rows_linear"), (512, 16, "few_rows_linear"), (2048, 1, "skinny_linear")],
)
def test_products_of_few_rows_have_norms_gates_and_sums_inside(
    hidden: int, rows: int, kernel: str, launches: list[Launch]
) -> None:
    config = msgspec.structs.replace(SMALL, hidden_size=hidden, mlp_bias=True)
    weights = labelled(allocate_dense(config, torch.bfloat16, CPU))
    products = FusedProducts(weights, make_workspace(config, 16, 4, torch.bfloat16, CPU), 1e-6)
    run(products, rows)
    assert launches == [
        (kernel, "qkv0 input_norm0"), (kernel, "output0"),
        (kernel, "up0 up0.bias post_norm0"), (kernel, "down0 down0.bias"),
        (kernel, "qkv1 input_norm1"), (kernel, "output1"),
        (kernel, "up1 up1.bias post_norm1"), (kernel, "down1 down1.bias"),
        ("rms_norm", "norm"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "sizes", "most"),
    [
        (torch.bfloat16, {}, 16),
        (torch.bfloat16, {"hidden_size": 2048}, 1),
        (torch.float32, {}, 1),
        (torch.float16, {}, 0),
        (torch.bfloat16, {"hidden_size": 192}, 0),
    ],
    ids=str,
)
def test_norms_are_inside_the_products_for_few_rows_of_models_that_it_pays_for(
    dtype: torch.dtype, sizes: dict[str, int], most: int
) -> None:
    assert most_fused_rows(weights_of(dtype, **sizes).layers) == most


def with_another_last_layer(**sizes: int) -> DenseWeights:
    weights, other = weights_of(torch.bfloat16), weights_of(torch.bfloat16, **sizes)
    return msgspec.structs.replace(weights, layers=[weights.layers[0], other.layers[1]])


def test_norms_are_inside_the_products_for_no_more_rows_than_suit_every_layer() -> None:
    assert most_fused_rows(weights_of(torch.bfloat16).layers) == 16
    assert most_fused_rows(with_another_last_layer(intermediate_size=200).layers) == 0


@pytest.mark.usefixtures("hopper")
def test_a_kernel_that_is_compiled_once_is_not_taken_for_layers_that_differ() -> None:
    pytest.importorskip(HOPPER_GATED)
    weights = with_another_last_layer(intermediate_size=1024)
    space = make_workspace(SMALL, 16, 4, torch.bfloat16, CPU)
    for choice in (choose_products(weights, space, 1e-6), choose_gated(weights, space)):
        assert choice.kernels is None
        assert choice.reason == "the kernel for Hopper takes layers of one size"
