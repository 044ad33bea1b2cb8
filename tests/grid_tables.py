"""Tables of the FlashAttention-2 paper's grid as documents quote them, from one run of a record."""

import math
from collections.abc import Iterator
from pathlib import Path

import flashdig
from flashdig.bench.results import read_record
from flashdig.bench.standings import BEST, Standing, standings

ROOT = Path(flashdig.__file__).parents[2]
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def of_run(name: str, revision: str) -> list[Standing]:
    """Who is ahead in the runs of a revision in `benchmarks/results/nvidia-h200/NAME`: one, or one
    for each head_dim."""
    record = read_record(ROOT / "benchmarks" / "results" / "nvidia-h200" / name)
    runs = [run.run_id for run in record.runs if run.revision == revision]
    assert runs
    return [one for run in runs for one in standings(record.rows_of(run))]


def grid_lines(
    found: list[Standing],
    beside: str | None = None,
    head_dims: tuple[int, ...] = (64, 128, 256),
) -> Iterator[tuple[str, list[float]]]:
    """Lines "| head_dim mask | TFLOP/s (ratio to the best peer) ... | mean |" and their ratios.

    beside: a peer whose TFLOP/s stand behind a stroke, and whose ratios count, instead.
    """
    for head_dim in head_dims:
        for causal, word in ((False, "full"), (True, "causal")):
            cells, ratios = [], []
            for seqlen in SEQLENS:
                (one,) = (
                    s
                    for s in found
                    if s.ours is not None
                    and not s.ours["features"]
                    and (s.ours["head_dim"], s.ours["head_dim_v"]) == (head_dim, head_dim)
                    and (s.ours["causal"], s.ours["seqlen_q"]) == (causal, seqlen)
                    and s.ours["num_heads"] == s.ours["num_heads_kv"] == 2048 // head_dim
                    and s.ours["dtype"] != "float16"
                )
                assert one.ours is not None
                ratio = one.against(beside or BEST)
                assert ratio is not None
                ratios.append(ratio.median)
                shown = f"({ratio.median:.2f})"
                if beside is not None:
                    shown = f"/ {one.peers[beside]['tflops']:.0f}"
                cells.append(f"{one.ours['tflops']:.0f} {shown}")
            mean = geometric_mean(ratios)
            yield f"| {head_dim} {word} | {' | '.join(cells)} | {mean:.2f} |", ratios
