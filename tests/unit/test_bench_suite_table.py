"""Standings and tables from rows: who is ahead, by how much, and how it is shown."""

import pytest
from rich.console import Console

from flashdig.bench.standings import BEST, means, standings
from flashdig.report.bench_table import (
    FA3_BACKWARD,
    backward_note,
    cell_labels,
    failure_lines,
    print_bench,
)


def row(backend: str, ms: float | None = None, gate: str = "ok", **changes):
    made = {
        "run_id": "r", "kind": "speed", "pass": "forward", "batch": 4, "num_heads": 16,
        "num_heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128,
        "head_dim_v": 128, "dtype": "bfloat16", "causal": False, "features": {},
        "name": "batch 4, heads 16, seqlen 4096", "backend": backend, "gate": gate,
    }  # fmt: skip
    if ms is not None:
        made |= {"ms": ms, "ms_all": [ms * (1 + i / 1000) for i in range(12)], "aa_spread": 0.004,
                 "clock": "graph", "l2": "warm", "tflops": 500 / ms,
                 "tensor_utilisation": 0.5 / ms}  # fmt: skip
    if "head_dim" in changes:
        made["head_dim_v"] = changes["head_dim"]
    return {**made, **changes}


ROWS = [
    row("hopper", 1.0, peak_bytes=67_000_000),
    row("sdpa_flash", 2.0, peak_bytes=68_000_000),
    row("fa3", 1.1),
    row("fa4", gate="error: RuntimeError: no kernel"),
    row("hopper", 1.0, causal=True),
    row("sdpa_flash", 1.6, causal=True),
    row("fa3", 0.8, causal=True),
    row("fa4", gate="not run: no head_dim 128", causal=True),
]


def test_ratios_are_ours_over_each_peer_and_the_best() -> None:
    full, causal = standings(ROWS)
    assert full.best == causal.best == "fa3"
    assert full.ratios["sdpa_flash"].median == pytest.approx(2.0)
    assert full.against_best.median == pytest.approx(1.1)
    assert not full.against_best.behind
    assert causal.against_best.behind
    assert set(full.ratios) == {"sdpa_flash", "fa3"}
    assert set(full.peers) == {"sdpa_flash", "fa3", "fa4"}


def test_means_are_geometric_and_count_the_cells_behind() -> None:
    against_flash, against_best = means(standings(ROWS), ["sdpa_flash", BEST])
    assert against_flash.ratio == pytest.approx((2.0 * 1.6) ** 0.5)
    assert (against_flash.cells, against_flash.behind) == (2, 0)
    assert against_best.ratio == pytest.approx((1.1 * 0.8) ** 0.5)
    assert (against_best.cells, against_best.behind) == (2, 1)
    both = means(standings([*ROWS, row("hopper", 1.0, head_dim=64), row("fa3", 2.0, head_dim=64)]),
                 [BEST])  # fmt: skip
    assert [(mean.head_dim, mean.cells) for mean in both] == [("128", 2), ("64", 1)]


def test_ours_without_a_time_has_no_ratio_and_peers_alone_are_shown() -> None:
    (failed,) = standings([row("hopper", gate="error: X"), row("fa3", 1.0)])
    assert failed.best == "fa3"
    assert failed.against_best is None
    (alone,) = standings([row("fa3", 1.0)])
    assert alone.ours is None
    assert means([failed, alone], [BEST]) == []


def test_several_of_ours_stand_below_each_other() -> None:
    found = standings([row("hopper", 1.0), row("triton", 1.5), row("fa3", 1.2)])
    assert [one.ours["backend"] for one in found] == ["hopper", "triton"]
    assert [one.against_best.median for one in found] == pytest.approx([1.2, 0.8])


def shown(rows, width: int, against: str | None = "sdpa_flash") -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_bench(rows, console, against)
    return console.export_text()


def test_everything_is_there_when_there_is_room() -> None:
    text = shown(ROWS, 200)
    for part in (
        "forward: batch 4, heads 16, seqlen 4096, head_dim 128, bfloat16",
        "1.000 ms", "500.0", "50.0 %", "250.0", "error",
        "1.100x fa3 [1.100 1.100]", "*0.800x fa3 [0.800 0.800]", "0.4 %",
        "67 MB", "68 MB",
        "fa4: error: RuntimeError: no kernel", "fa4: not run: no head_dim 128",
        "forward, head_dim 128: hopper is 1.789x as fast as sdpa_flash "
        "(geometric mean of 2 cells, none behind)",
        "as fast as the best peer (geometric mean of 2 cells, 1 behind)",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize("width", [60, 80, 100, 130])
def test_any_width_shows_our_time_and_the_ratio(width) -> None:
    text = shown(ROWS, width)
    assert "1.000 ms" in text
    assert "*0.800x fa3" in text
    assert ("a wider terminal shows" in text) == (width < 130)
    tables = [line for line in text.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, tables)) <= width


def test_labels_say_what_differs_and_names_where_there_are_some() -> None:
    paper = [row("a", batch=8 // s, seqlen_q=s, seqlen_k=s, causal=c, num_heads=h, head_dim=d)
             for h, d in ((32, 64), (16, 128)) for c in (False, True) for s in (1, 2)]  # fmt: skip
    constants, labels = cell_labels(paper)
    assert labels[0] == "seqlen 1, head_dim 64, full"
    assert labels[-1] == "seqlen 2, head_dim 128, causal"
    assert len(set(labels)) == len(labels)
    assert constants == "bfloat16"
    named = [row("a", name="GQA 32/8"), row("a", name="window", features={"window": [3, 0]})]
    assert cell_labels(named) == ("", ["GQA 32/8", "window"])
    assert cell_labels([row("a")])[1] == [
        "batch 4, heads 16, seqlen 4096, head_dim 128, bfloat16, full"
    ]


def test_each_reason_is_said_once() -> None:
    rows = [row("fa4", gate="not run: no"), row("fa4", gate="not run: no", causal=True),
            row("hopper", notes="no time: round 1: boom"), row("fa3", 1.0)]  # fmt: skip
    assert failure_lines(rows) == [
        "fa4: not run: no (2 times)",
        "hopper: no time: round 1: boom",
    ]


def test_backward_ratios_without_flash_attention_3_say_so() -> None:
    backward = [{**one, "pass": "backward"} for one in ROWS]
    without = [one for one in backward if one["backend"] != "fa3"]
    assert backward_note(without) == FA3_BACKWARD
    assert FA3_BACKWARD[:30] in shown(without, 300)
    assert backward_note(backward) is None
    assert backward_note(ROWS) is None


def test_columns_without_a_figure_are_left_out() -> None:
    rows = [row("tiled", 1.0, tensor_utilisation=None), row("sdpa_math", 2.0),
            row("flex", gate="not run: compiled for CUDA devices only")]  # fmt: skip
    table = shown(rows, 200).partition("└")[0]
    assert "sdpa_math" in table
    assert "of peak" not in table
    assert "flex" not in table


def test_memory_alone_has_one_table() -> None:
    rows = [row("hopper", peak_bytes=1000), row("fa4", peak_bytes=2000)]
    text = shown(rows, 120, None)
    assert "vs best" not in text
    assert "1 kB" in text
