"""The process that `counters` starts under Nsight Compute: each exhibit once, in its NVTX range.

python -m flashdig.evidence.counters_worker FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from flashdig.evidence.counters import range_name
from flashdig.generations.ladder import generation


def run_each(
    names: Sequence[str], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> dict[str, str]:
    """Warm all exhibits up, then run each once under the profiler; exhibit -> its error."""
    failed: dict[str, str] = {}

    def call(name: str) -> Callable[[], object]:
        return partial(generation(name).run, q, k, v, causal)

    def attempt(name: str, work: Callable[[], object]) -> None:
        try:
            work()
            torch.cuda.synchronize()
        except Exception as error:  # of torch, Triton or a library: told in the answer, not fatal
            text = str(error).strip().splitlines()
            failed[name] = text[0].rstrip(".") if text else type(error).__name__

    for name in names:
        attempt(name, call(name))  # compiles, and makes what is made once
    for name in names:
        if name not in failed:
            attempt(name, partial(_counted, name, call(name)))
    return failed


def _counted(name: str, work: Callable[[], object]) -> None:
    torch.cuda.profiler.start()
    torch.cuda.nvtx.range_push(range_name(name))
    try:
        work()
        torch.cuda.synchronize()
    finally:
        torch.cuda.nvtx.range_pop()
        torch.cuda.profiler.stop()


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    inputs = torch.load(folder / "inputs.pt", weights_only=True, map_location=request["device"])
    torch.backends.cuda.matmul.fp32_precision = "tf32" if request["tf32"] else "ieee"
    if inputs["q"].device.type == "cuda":
        torch.cuda.set_device(inputs["q"].device)
    with torch.no_grad():
        failed = run_each(
            request["names"], inputs["q"], inputs["k"], inputs["v"], request["causal"]
        )
    (folder / "answer.json").write_text(json.dumps(failed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
