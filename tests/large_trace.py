"""A large trace that is the same every time, and how long and how much memory reading it takes.

    python -m tests.large_trace 500            # MB, plain
    python -m tests.large_trace 500 --gzip

Writes the file into a temporary directory, reads it in a fresh process, compares the counts and
sums with the generator's, and prints seconds and peak memory. The mix of events is that of real
recordings: four operators with shapes, one launch and two flow arrows for each kernel.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_NAMES = 300
_BLOCK = 64  # groups that are written in another order than they ran in


def groups(count: int) -> Iterator[list[dict[str, object]]]:
    """`count` kernels with everything around them, in blocks whose order is turned about."""
    for first in range(0, count, _BLOCK):
        block = range(first, min(first + _BLOCK, count))
        for index in sorted(block, key=lambda i: i * 7919 % 64):
            yield _group(index)


def _group(index: int) -> list[dict[str, object]]:
    at = 5107937722000.125 + index * 40
    number = index * 5
    rows = 64 * (1 + index % 40)
    inputs = {
        "Concrete Inputs": ["", ""],
        "Input type": ["c10::BFloat16", "c10::BFloat16"],
        "Input Strides": [[1024, 1], [1, 1024]],
        "Input Dims": [[rows, 1024], [1024, 512]],
    }
    operators = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": name,
            "pid": 1144,
            "tid": 1144,
            "ts": f"{at + depth:.3f}",
            "dur": f"{30 - 2 * depth}.250",
            "args": {"External id": number + depth, "Record function id": 0, **inputs},
        }
        for depth, name in enumerate(("aten::linear", "aten::matmul", "aten::mm", "aten::resolve"))
    ]
    launch = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 1144,
        "tid": 1144,
        "ts": f"{at + 5:.3f}",
        "dur": "4.125",
        "args": {"External id": number + 2, "cbid": 211, "correlation": index + 1},
    }
    arrow = {"ph": "s", "id": index + 1, "pid": 1144, "tid": 1144, "cat": "ac2g", "name": "ac2g"}
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": f"void gemm_kernel<{index % _NAMES}, cutlass::bfloat16_t>(Params)",
        "pid": 0,
        "tid": 7,
        "ts": f"{at + 12:.3f}",
        "dur": f"{duration_ns(index) / 1000:.3f}",
        "args": {
            "External id": number + 2,
            "queued": 0,
            "device": 0,
            "context": 1,
            "stream": 7,
            "correlation": index + 1,
            "registers per thread": 168,
            "shared memory": 1024 * (index % 32),
            "blocks per SM": 1.5,
            "warps per SM": 6.0,
            "grid": [1 + index % 500, 1, 1],
            "block": [128, 1, 1],
            "est. achieved occupancy %": index % 100,
        },
    }
    return [*operators, launch, arrow, kernel, arrow | {"ph": "f", "bp": "e"}]


def duration_ns(index: int) -> int:
    """Duration of kernel `index`; some are below a microsecond."""
    return 1 + index * 6151 % 25_000


def write_trace(path: Path, megabytes: float) -> tuple[int, int]:
    """Write about that many MB of text; returns the number of kernels and their total in ns."""
    sample = sum(len(json.dumps(event)) + 2 for group in groups(256) for event in group) / 256
    count = max(1, int(megabytes * 1e6 / sample))
    with gzip.open(path, "wt", 6) if path.suffix == ".gz" else path.open("w") as file:
        file.write('{"schemaVersion": 1,\n"traceEvents": [\n')
        for position, group in enumerate(groups(count)):
            text = ",\n".join(map(json.dumps, group))
            file.write(f"{',' if position else ''}{text}\n")
        file.write('],\n"baseTimeNanoseconds": 1790857026000000000}\n')
    return count, sum(map(duration_ns, range(count)))


def read_and_report(path: str) -> dict[str, float]:
    """Read and sum up one trace in this process; seconds, peak memory in MiB, sums."""
    from flashdig.readers.files import read_traces
    from flashdig.readers.summary import summarize

    begin = time.perf_counter()
    (trace,) = read_traces([path])
    read = time.perf_counter() - begin
    summary = summarize(trace)
    return {
        "read_s": read,
        "total_s": time.perf_counter() - begin,
        "cpu_s": time.process_time(),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "kernels": len(trace.kernels),
        "host_ops": len(trace.host_ops),
        "duration_ns": sum(kernel.duration_ns for kernel in trace.kernels),
        "busy_ns": summary.busy_ns or 0,
        "base_time_ns": trace.base_time_ns or 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("megabytes", type=float, nargs="?")
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read_and_report(options.read)))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / ("large.json.gz" if options.gzip else "large.json")
        count, total = write_trace(path, options.megabytes or 500)
        print(f"{path.stat().st_size / 1e6:,.0f} MB, {count:,} kernels", flush=True)
        command = [sys.executable, "-m", "tests.large_trace", "--read", str(path)]
        found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        print(json.dumps(found, indent=1))
        assert (found["kernels"], found["duration_ns"]) == (count, total)
        assert found["busy_ns"] == total  # no two overlap
        assert found["host_ops"] == 4 * count
        assert found["base_time_ns"] == 1790857026000000000


if __name__ == "__main__":
    main()
