"""What the first call of a process takes: kernels to compile, kernels on disk, and eight processes
that find one cache empty.

Each process imports and wakes the GPU first, then waits for the word, so that only the first
attention and its gradients are timed, and eight of them begin together.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flashdig
from flashdig.bench.cells import Cell
from flashdig.bench.host import CELL
from flashdig.bench.results import Row

PROCESSES = 8
REPEATED = 2  # processes with a cache of their own, which say how far apart two are
TIMEOUT = 300.0  # seconds, of one process

_WORKER = """
import json, sys, time
import torch
from flashdig import attention

batch, seqlen, heads, head_dim, dtype, causal = json.loads(sys.argv[1])
torch.manual_seed(0)
q, k, v = (
    torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=getattr(torch, dtype))
    .requires_grad_()
    for _ in range(3)
)
dout = torch.randn_like(q)
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
times = [time.perf_counter()]
out = attention(q, k, v, causal=causal)
torch.cuda.synchronize()
times.append(time.perf_counter())
gradients = torch.autograd.grad(out, (q, k, v), dout)
torch.cuda.synchronize()
times.append(time.perf_counter())
sums = [x.double().sum().item() for x in (out, *gradients)]
print(json.dumps({"forward": times[1] - times[0], "backward": times[2] - times[1], "sums": sums}))
"""


class FirstCallError(RuntimeError):
    """A process failed, or two of them disagree; the message holds what it said."""


def measure_first_calls(
    run_id: str, *, cell: Cell = CELL, progress: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Rows of the first call, forward and backward: empty cache, warm cache, processes at once.

    Raises FirstCallError when a process fails or a result differs from another process's.
    """
    seconds: dict[str, dict[str, list[float]]] = {}
    sums: list[list[float]] = []
    with tempfile.TemporaryDirectory() as root:
        own = [str(Path(root) / str(number)) for number in range(REPEATED)]
        together = [str(Path(root) / "together")] * PROCESSES
        for name, folders in (
            ("empty cache", own),
            ("warm cache", own),
            (f"{PROCESSES} processes at once, empty cache", together),
        ):
            progress(f"first call, {name}")
            _add(seconds, sums, name, _first_calls(cell, folders))
    if any(one != sums[0] for one in sums):
        raise FirstCallError(f"processes disagree about the sums of their results: {sums}")
    return [
        _row(cell, run_id, f"{direction}, {name}", all_of_it)
        for name, times in seconds.items()
        for direction, all_of_it in times.items()
    ]


def _add(
    seconds: dict[str, dict[str, list[float]]],
    sums: list[list[float]],
    name: str,
    answers: Sequence[dict[str, Any]],
) -> None:
    times = seconds.setdefault(name, {"forward": [], "backward": []})
    for answer in answers:
        sums.append(answer["sums"])
        for direction, all_of_it in times.items():
            all_of_it.append(answer[direction])


def _first_calls(cell: Cell, folders: Sequence[str]) -> list[dict[str, Any]]:
    """What processes answer that begin together, one for each cache folder."""
    sizes = [cell.batch, cell.seqlen_q, cell.num_heads, cell.head_dim, cell.dtype, cell.causal]
    source = str(Path(flashdig.__file__).parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", _WORKER, json.dumps(sizes)]
    with contextlib.ExitStack() as stack:
        workers = []
        for folder in folders:
            environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": folder}
            workers.append(stack.enter_context(_started(command, environment)))
        for worker in workers:
            assert worker.stdout is not None
            if worker.stdout.readline().strip() != "ready":
                _, said = worker.communicate(timeout=TIMEOUT)
                raise FirstCallError(f"a process did not start: {said.strip()[-500:]}")
        for worker in workers:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is dead: its answer says why
                worker.stdin.write("go\n")
                worker.stdin.flush()
        return [_answer(worker) for worker in workers]


@contextlib.contextmanager
def _started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    worker = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield worker
    finally:
        worker.kill()
        worker.communicate()


def _answer(worker: subprocess.Popen[str]) -> dict[str, Any]:
    answered, said = worker.communicate(timeout=TIMEOUT)
    if worker.returncode != 0:
        raise FirstCallError(f"a process failed: {said.strip()[-500:]}")
    answer: dict[str, Any] = json.loads(answered)
    return answer


def _row(cell: Cell, run_id: str, name: str, seconds: Sequence[float]) -> Row:
    ms_all = [second * 1e3 for second in seconds]
    middle = statistics.median(ms_all)
    features = {**cell.features, "first_call": name}
    return {
        "run_id": run_id,
        "kind": "step",
        "pass": "host",
        **cell.fields(),
        "name": name,
        "features": features,
        "gate": "ok",
        "ms": middle,
        "ms_all": ms_all,
        "aa_spread": (max(ms_all) - min(ms_all)) / middle,
        "clock": "host",
        "l2": "cold",
        "notes": f"{len(ms_all)} processes, slowest {max(ms_all) / 1e3:.2f} s",
    }
