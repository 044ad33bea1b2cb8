"""What is asked of decoding: to be near the speed at which memory can be read at all, measured in
the same run (`kernels.triton.read_bytes`), and well ahead of the peers where they leave room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashdig.bench.timing import median_ratio

READ = "read"
# where the best peer leaves more than a fifth of the bandwidth, we must be so much faster
ROOM, AHEAD = 0.80, 1.15
# (keys in all from which on, share of the bandwidth that we must reach)
SHARES = ((512 * 1024, 0.90), (64 * 1024, 0.75))


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is asked of each cell and cache of one run that has our time, a peer's and `READ`'s.

    Each: cell, cache, share (of the bandwidth, ours), peer (the fastest), peer_share, ratio (its
    time over ours, median of rounds), and asked: [(what in words, whether it is met)].
    """
    cells: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        features = row["features"]
        if "ms" in row and features.get("schedule", "chosen") == "chosen":
            cells.setdefault((features["cell"], features["cache"]), {})[row["backend"]] = row
    found = []
    for (cell, cache), there in cells.items():
        peers = [row for name, row in there.items() if name not in ("triton", READ)]
        if "triton" not in there or READ not in there or not peers:
            continue
        ours, read = there["triton"], there[READ]
        best = min(peers, key=lambda row: float(row["ms"]))
        share, peer_share = (read["ms"] / row["ms"] for row in (ours, best))
        ratio = median_ratio(best["ms_all"], ours["ms_all"]).median
        asked = []
        if peer_share < ROOM:
            asked.append((f"{AHEAD} of {best['backend']}", ratio >= AHEAD))
        for keys, least in SHARES:
            if ours["features"]["keys"] >= keys:
                asked.append((f"{least:.0%} of the bandwidth", share >= least))
                break
        found.append(
            {
                "cell": cell,
                "cache": cache,
                "share": share,
                "peer": best["backend"],
                "peer_share": peer_share,
                "ratio": ratio,
                "asked": asked,
            }
        )
    return found


def goal_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """`goals_of` as a table in Markdown; "" where nothing can be said."""
    goals = goals_of(rows)
    if not goals:
        return ""
    text = [
        "| batch x keys, cache | of the bandwidth | best peer | it | ratio | asked |",
        "| --- " * 6 + "|",
    ]
    for goal in goals:
        asked = ", ".join(
            f"{what}: {'met' if met else '**missed**'}" for what, met in goal["asked"]
        )
        text.append(
            f"| {goal['cell']}, {goal['cache']} | {goal['share']:.1%} | {goal['peer']} "
            f"| {goal['peer_share']:.1%} | {goal['ratio']:.3f} | {asked or 'nothing'} |"
        )
    return "\n".join(text)
