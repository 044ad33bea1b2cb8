"""The ladder's table: what a person sees at any width, from rows of a record."""

import copy

import pytest
from rich.console import Console

from flashdig.report.dig_table import ladder_table, legend, print_ladder, surprise_lines

ROW = {
    "name": "v2",
    "gate": "ok",
    "sentence": "2.00x faster than v1: O stays in registers.",
    "batch": 4,
    "num_heads": 16,
    "num_heads_kv": 4,
    "seqlen_q": 2048,
    "seqlen_k": 2048,
    "head_dim": 64,
    "dtype": "float32",
    "features": {"tf32": True},
    "causal": True,
    "ms": 1.25,
    "tflops": 321.0,
    "speedup": 2.0,
    "share_of_matmul": 0.5,
    "share_of_copy": 1.2,
    "peak_bytes": 67_110_000,
    "error": 4.9e-4,
    "predicted": {
        "load_bytes": 3_000_000_000,
        "store_bytes": 70_000_000,
        "triton_load_bytes": 2_000_000_000,
        "triton_store_bytes": 70_000_000,
        "at_observed_clock": {"expected_ms": 1.5},
    },
    "counted": {
        "load_bytes": 2_000_000_004,
        "store_bytes": 70_000_000,
        "matmul_flops": 1,
        "source": "interpreter",
    },
    "kernels": [
        {"name": "flash_fwd_v2", "count": 1, "us": 1250.0},
        {"name": "Memset (Device)", "count": 2, "us": 1.0},
        {"name": "Memcpy DtoD (Device -> Device)", "count": 1, "us": 3.0},
    ],
    "surprises": [
        {"what": "time", "predicted": 1.5, "found": 1.25, "tolerance": 0.15, "cause": "unexplained"}
    ],
}
REFUSED = {
    **{name: ROW[name] for name in list(ROW)[3:12]},
    "name": "sdpa_cudnn",
    "gate": "not run: needs a CUDA device",
    "sentence": "Not run: needs a CUDA device.",
    "predicted": {},
}


def shown(rows, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_ladder(rows, console)
    return console.export_text()


def test_everything_is_there_when_there_is_room() -> None:
    text = shown([ROW, REFUSED], 200)
    for part in (
        "batch 4, heads 16/4, seqlen 2048, head_dim 64, float32 with TF32, causal",
        "1.250 ms",
        "1.20x",  # expected over found
        "321.0",
        "50 %",
        "120 %",
        "2.00x",
        "3 GB",
        "70 MB",
        "67.1 MB",
        "1 + 1 copy",
        "4.9e-04",
        "v2: 2.00x faster than v1",
        "surprise time: guessed 1.5 ms, found 1.25 ms: unexplained",
        "sdpa_cudnn: Not run",
    ):
        assert part in text, part


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_the_table_fits_any_width_and_names_what_it_left_out(width) -> None:
    rows = [ROW, REFUSED]
    table, hidden = ladder_table(rows, width)
    console = Console(width=width)
    assert console.measure(table).minimum <= width
    everything, _ = ladder_table(rows, 1000)
    assert len(table.columns) + len(hidden) == len(everything.columns)
    if hidden:
        assert f"a wider terminal shows: {hidden[0]}" in shown(rows, width)
    assert "1.250 ms" in shown(rows, width)


def test_predicted_bytes_are_marked_and_counted_ones_replace_the_kernels_part() -> None:
    assert "3 GB" in shown([ROW], 200)
    assert "~3 GB" not in shown([ROW], 200)
    uncounted = copy.deepcopy(ROW)
    del uncounted["counted"]
    assert "~3 GB" in shown([uncounted], 200)


def test_measured_memory_has_a_column_where_counters_were_read() -> None:
    assert "DRAM" not in shown([ROW], 300)
    assert "DRAM" not in legend([ROW])
    row = {**ROW, "counters": {"dram_read_bytes": 4 * 10**9, "dram_write_bytes": 10**9}}
    assert "5 GB" in shown([row], 300)
    assert "by Nsight Compute" in legend([row])


STEP = {
    **ROW,
    "name": "step:exp2",
    "features": {"path": "cumulative"},
    "share_of_gain": 0.05,
    "predicted": {"at_observed_clock": {"floor_ms": 0.5, "limiter": "tensor cores"}},
}


def test_occupancy_stands_beside_its_guess() -> None:
    kernels = [
        {"name": "flash_fwd_v2", "count": 1, "us": 10.0, "occupancy_percent": 25.0},
        {"name": "void at::native::copy", "count": 1, "us": 90.0, "occupancy_percent": 100.0},
    ]
    guessed = {**ROW, "kernels": kernels, "predicted": {**ROW["predicted"], "occupancy": 0.125}}
    assert "25 % (12 %)" in shown([guessed], 300)
    assert "100 %" in shown([{**ROW, "kernels": kernels}], 300)


HALF = {
    **ROW,
    "name": "split_q",
    "features": {
        "path": "pair",
        "instructions": {
            "BAR": 5,
            "SHFL": 8,
            "LDS": 6,
            "LDSM": 36,
            "STS": 0,
            "STSM": 0,
            "HMMA": 64,
        },
        "registers": 142,
    },
}


def test_steps_have_tables_of_their_own() -> None:
    left_out = {**STEP, "name": "without:exp2", "features": {"path": "leave-one-out"}}
    text = shown([ROW, STEP, left_out, HALF], 200)
    for part in (
        "v1 to v2, one step more at a time",
        "v2 without one step",
        "warps split the queries or the keys",
        "vs before",
        "of the gain",
        "vs split-K",
        "5 8 6 36 0",
    ):
        assert part in text, part


def test_legend_says_whether_anything_was_timed() -> None:
    assert legend([ROW]).startswith("expected:")
    assert legend([REFUSED]).startswith("No GPU: no time was measured.")


def test_no_surprise_no_line() -> None:
    assert surprise_lines({**ROW, "surprises": []}) == []
    assert surprise_lines(REFUSED) == []
