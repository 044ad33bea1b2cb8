"""Damaged and hostile recordings: rules find something or nothing, and never fail."""

import copy
import gzip
import json
import os
import random
import tempfile
from pathlib import Path

import pytest

from flashdig.findings import find_in_counters, find_in_trace
from flashdig.findings.explanation import explain
from flashdig.findings.recording import Recording
from flashdig.hardware.devices import find_device
from flashdig.readers.ncu_metrics import kernel_from_metrics
from flashdig.readers.open_file import UnreadableFileError
from flashdig.readers.trace import read_kineto
from tests.trace_files import recorded

NAMES = ("attn_naive", "attn_sdpa_math", "attn_train_sdpa_cudnn", "findings/repeated_heads.before")
HOSTILE = (
    None,
    0,
    -1,
    1 << 70,
    "",
    "nan",
    [],
    [0],
    [-1, "x"],
    {},
    [[]],
    [[1 << 40] * 9],
    True,
    1e308,
)


def damaged(name: str, seed: int) -> dict[str, object]:
    """A recording with some of its values replaced, dropped or shuffled."""
    draw = random.Random(seed)
    content = json.loads(gzip.decompress(Path(recorded(name)).read_bytes()))
    for event in draw.sample(content["traceEvents"], k=len(content["traceEvents"]) // 3):
        where = event.get("args") if draw.random() < 0.7 else event
        if not isinstance(where, dict) or not where:
            continue
        key = draw.choice(sorted(where))
        if draw.random() < 0.3:
            del where[key]
        elif draw.random() < 0.5:
            where[key] = copy.deepcopy(draw.choice(HOSTILE))
        else:
            value = where[key]
            if isinstance(value, list) and value:
                value[draw.randrange(len(value))] = copy.deepcopy(draw.choice(HOSTILE))
    if draw.random() < 0.3:
        content["deviceProperties"] = draw.choice([[], [{}], [{"name": "NVIDIA H200"}], 7])
    return content


@pytest.mark.parametrize("name", NAMES)
def test_damaged_traces(name) -> None:
    for seed in range(int(os.environ.get("FUZZ_EXAMPLES", "6"))):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.write(json.dumps(damaged(name, seed)).encode())
            file.flush()
            try:
                trace = read_kineto(file.name)
            except UnreadableFileError:
                continue
        recording = Recording.of(trace)
        findings = find_in_trace(trace, recording.summary)
        for finding in findings:
            json.dumps(finding.to_dict(), allow_nan=False)
        json.dumps([one.to_dict() for one in explain(recording, findings)], allow_nan=False)


def test_counters_that_are_missing_or_zero() -> None:
    draw = random.Random(0)
    names = sorted(
        {
            *("gpu__time_duration.sum", "gpc__cycles_elapsed.max", "dram__bytes_read.sum"),
            *(
                "dram__bytes_write.sum",
                "smsp__inst_executed.sum",
                "derived__local_spilling_requests",
            ),
            "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
            "sm__maximum_warps_per_active_cycle_pct",
            "smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio",
            "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
            "gpc__cycles_elapsed.avg.per_second",
        }
    )
    for _ in range(200):
        metrics: dict[str, float | str] = {
            name: draw.choice([0.0, 1.0, 1e9, 80.0]) for name in names if draw.random() < 0.7
        }
        kernel = kernel_from_metrics(
            number=1, name="pytorch_flash::flash_fwd_kernel", source="x", metrics=metrics
        )
        for finding in find_in_counters([kernel], find_device("h200")):
            json.dumps(finding.to_dict(), allow_nan=False)
