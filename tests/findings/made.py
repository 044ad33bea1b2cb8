"""Recordings made by hand: attention calls with the launch, sizes and times that a test wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from flashdig.readers.files import read_traces
from flashdig.readers.model import Trace
from tests.trace_files import Event, host, kernel, write

FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
    "cutlass::bfloat16_t, Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, "
    "{causal}, false, false, true, true, false, false>(pytorch_flash::Flash_fwd_params)"
)
GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
H200 = {
    "id": 0,
    "name": "NVIDIA H200",
    "totalGlobalMem": 150109880320,
    "computeMajor": 9,
    "computeMinor": 0,
    "maxThreadsPerMultiprocessor": 2048,
    "warpSize": 32,
    "numSms": 132,
    "regsPerMultiprocessor": 65536,
    "sharedMemPerMultiprocessor": 233472,
    "sharedMemPerBlockOptin": 232448,
}


def flash_call(
    number: int,
    *,
    shape: tuple[int, int, int, int],
    grid: tuple[int, int, int],
    us: float,
    causal: bool = False,
    strides: Sequence[int] | None = None,
    start: float | None = None,
    registers: int = 255,
) -> list[Event]:
    """scaled_dot_product_attention by its flash backend: operator, launch and kernel.

    Args:
        shape: (batch, heads, seqlen, head_dim) of q, k and v.
        us: duration of the kernel, microseconds.
    """
    at = 1000.0 * number if start is None else start
    _, heads, seqlen, dim = shape
    own = list(strides or (heads * seqlen * dim, seqlen * dim, dim, 1))
    inputs = {
        "Input Dims": [*[list(shape)] * 3, [], [], [], [], []],
        "Input type": [*["c10::BFloat16"] * 3, "", "Scalar", "Scalar", "", "Scalar"],
        "Input Strides": [*[own] * 3, [], [], [], [], []],
        "Concrete Inputs": ["", "", "", "", "0.", str(causal), "", "False"],
    }
    name = "aten::_scaled_dot_product_flash_attention"
    correlation = 100 + number
    return [
        host(
            "cpu_op",
            "aten::scaled_dot_product_attention",
            at,
            60,
            **inputs,
            **{"External id": 10 * number + 1},
        ),
        host("cpu_op", name, at + 5, 50, **{"External id": 10 * number + 2}),
        host(
            "cuda_runtime",
            "cudaLaunchKernel",
            at + 30,
            5,
            correlation=correlation,
            **{"External id": 10 * number + 2},
        ),
        kernel(
            FLASH.format(causal="true" if causal else "false"),
            at + 70,
            us,
            device=0,
            correlation=correlation,
            grid=list(grid),
            block=[128, 1, 1],
            **{
                "registers per thread": registers,
                "shared memory": 49152,
                "est. achieved occupancy %": 13,
                "External id": 10 * number + 2,
            },
        ),
    ]


def flat(calls: Iterable[list[Event]]) -> list[Event]:
    """The events of all calls."""
    return [event for call in calls for event in call]


def read(tmp_path: Path, events: Sequence[Event], name: str = "made.json") -> Trace:
    """The events as a trace of an H200."""
    (trace,) = read_traces([write(tmp_path / name, events, deviceProperties=[H200])])
    return trace
