"""Rows of packed results that belong to no sequence, cleared by Triton's interpreter."""

import json
import os
import subprocess
import sys

PROGRAM = """
import json, random, sys, torch
from flashdig.kernels.triton.slack import clearing

for turn in range(8):
    draw = random.Random(turn)
    lengths = [draw.choice((0, 0, 1, 5, 64, 70, 130)) for _ in range(draw.randint(1, 9))]
    used = lengths if turn % 2 else [draw.choice((n, n // 2, 0, n + 3)) for n in lengths]
    starts = [draw.choice((0, 7))]
    for length in lengths:
        starts.append(starts[-1] + length)
    total, heads, width = starts[-1] + draw.choice((1, 9, 80)), draw.choice((1, 3)), 40
    out = torch.full((total, heads, width), 7.0, dtype=torch.float16)
    lse = torch.full((heads, total), 7.0)
    clearing(len(lengths), total, heads, width)(
        out,
        lse,
        torch.tensor(starts, dtype=torch.int32),
        None if turn % 2 else torch.tensor(used, dtype=torch.int32),
    )
    inside = torch.zeros(total, dtype=torch.bool)
    for start, length, rows in zip(starts, lengths, used):
        inside[start : start + min(length, rows)] = True
    assert (out[inside] == 7).all() and (out[~inside] == 0).all(), (turn, starts, used)
    assert (lse[:, inside] == 7).all() and torch.isneginf(lse[:, ~inside]).all(), (turn, starts)
print(json.dumps("done"))
"""


def test_only_rows_of_no_sequence_are_cleared() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == "done"
