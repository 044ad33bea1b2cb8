"""Large traces on a small scale: exact counts, and a buffer that does not grow with the file.

`python -m tests.large_trace 500` does the same with 500 MB and reports seconds and memory.
"""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashdig.readers.json_stream import JsonStream
from tests.large_trace import read_and_report, write_trace
from tests.trace_files import kernel


@pytest.mark.parametrize("name", ["large.json", "large.json.gz"])
def test_counts_and_sums_are_the_generators(tmp_path: Path, name: str) -> None:
    count, total = write_trace(tmp_path / name, 4)
    found = read_and_report(str(tmp_path / name))
    assert (found["kernels"], found["host_ops"]) == (count, 4 * count)
    assert (found["duration_ns"], found["busy_ns"]) == (total, total)
    assert found["base_time_ns"] == 1790857026000000000


def test_memory_does_not_grow_with_the_file() -> None:
    event = json.dumps(kernel("k" * 500, 1, 2)) + ",\n"
    block = (event * 1500).encode()

    def pieces(count: int) -> Iterator[bytes]:
        yield b'{"traceEvents": ['
        for _ in range(count):
            yield block
        yield b'{"ph": "X"}]}'

    peaks = []
    for count in (2, 12):
        tracemalloc.start()
        seen = sum(1 for _ in JsonStream(pieces(count)).events())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert seen == 1500 * count + 1
    assert peaks[1] < 1.5 * peaks[0]
