"""Every kernel of the GPU path compiles for a Hopper GPU, also where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS / "support/kernels/compile_for_gpu.py"


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("capability", "shared", "models"),
    [
        pytest.param("90", 232_448, ["1"], marks=pytest.mark.slow),
        pytest.param("90", 232_448, [], marks=pytest.mark.slow),
        *(
            pytest.param(capability, shared, [], marks=pytest.mark.slow)
            for capability, shared in (
                ("80", 166_912),
                ("86", 101_376),
                ("89", 101_376),
                ("100", 232_448),
                ("120", 101_376),
            )
        ),
    ],
)
def test_all_kernels_compile_and_fit_the_devices_shared_memory(
    capability: str, shared: int, models: list[str], tmp_path: Path
) -> None:
    """What these compute capabilities have for a program (CUDA programming guide)."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["CAPABILITY"] = capability
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment["SHARED_BYTES"] = str(shared)
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *models],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2390,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"(\w+): (\d+) bytes shared", done.stdout)
    kernels = {name for name, _ in found}
    assert {
        "_decode_kernel", "_prefill_kernel", "_few_rows_kernel", "_best_kernel",
        "_ban_words_kernel", "_adjust_kernel", "_floor_kernel", "_add_tokens_kernel",
        "_survey_kernel", "_likeliest_kernel", "_prefix_kernel", "_add_normed_kernel",
        "_softcap_kernel", "_row_inputs_kernel", "_pack_heads_kernel",
        "_rotate_heads_kernel", "_quantized_kernel", "_attention_kernel", "_pool_kernel",
        "_stages_kernel", "_surprise_kernel", "_all_reduce_kernel", "_few_rows_codes_kernel",
        "_many_rows_kernel", "_widen_kernel", "_shrink_kernel", "_expand_kernel",
        "_place_kernel", "_fixed_linear_kernel", "_fixed_attention_kernel",
        "_place_drafts_kernel", "_accept_drafts_kernel", "_count_ahead_kernel",
        "_count_accepted_kernel",
    } <= kernels  # fmt: skip
    assert models or {"_row_kernel", "_split_kernel"} <= kernels
    for name in (
        "_hopper_prefill_kernel", "_hopper_prefix_kernel", "hopper_decode_kernel", "plan_kernel",
        "_rows_kernel", "_gated_kernel", "_compress_kernel", "_compressed_kernel", "_block_kernel",
    ):  # fmt: skip
        assert (name in kernels) == (capability == "90"), done.stdout
    for name in (
        "_quantize_rows_kernel", "_quantize_blocks_kernel", "_rms_norm_fp8_kernel",
        "_add_rms_norm_fp8_kernel", "_gated_fp8_kernel", "_quantize_int8_kernel", "_int8_kernel",
    ):  # fmt: skip
        assert (name in kernels) == (capability in ("89", "90", "100", "120"))
    assert not re.findall(r"(\w+) may end before it has waited", done.stdout)
    for name, size in found:
        assert int(size) <= shared, name
