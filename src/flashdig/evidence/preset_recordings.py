"""Recordings of the source articles' attention, each variant once: what `flashdig explain --preset`
reads.

`profiling-article`: a torch.profiler trace a variant, three steps of one causal attention, each
gated against float64 first and then timed against the others. `archaeology`: a trace of each of
the exhibits v1, v2 and v2 with K transposed beforehand, and Nsight Compute's counters of all three.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashdig.bench.cell_gate import CellReference, cell_reference
from flashdig.bench.cell_inputs import CellInputs, make_inputs
from flashdig.bench.cells import Cell
from flashdig.bench.competitors import Prepared, ours_for
from flashdig.bench.environment import collect, revision
from flashdig.bench.peers import peer
from flashdig.bench.timing import Timing, time_rotated
from flashdig.evidence.capture import NO_PERMISSION, record
from flashdig.evidence.counters import find_ncu
from flashdig.evidence.worker import LOG, run_worker
from flashdig.generations.ladder import generation

MANIFEST = "manifest.json"
COUNTERS = "counters.csv.gz"
RANGE = "attn_fwd"
STEPS = 3
WARM_UP = 3
# exhibits of the ladder, then peers; flashdig's own backend is added by its name
EXHIBITS = ("naive", "inplace", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn")
PEERS = ("fa3", "fa4", "flex")
ARTICLE = Cell(4, 16, 16, 2048, 2048, 64, 64, "bfloat16", causal=True)
DUG = ("v1", "v2", "v2_transposed")
# batch, heads, seqlen, head_dim of the archaeology article, in float32
DUG_SHAPE = (10, 64, 1024, 64)
# of the columns that Nsight Compute writes: what the readers and the rules use
_KEPT_COLUMNS = re.compile(
    r"^(ID|Process ID|Kernel Name|Context|Stream|Block Size|Grid Size|Device|CC"
    r"|.*(Push/Pop|Start/Stop)_Range.*"
    r"|gpu__time_duration\.sum|gpc__cycles_elapsed\.(max|avg\.per_second)"
    r"|dram__bytes_(read|write)\.sum|gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|lts__t_sectors\.sum|lts__t_sectors_srcunit_tex(_op_read|_op_write)?\.sum"
    r"|lts__t_sector_hit_rate\.pct|l1tex__t_sector_hit_rate\.pct"
    r"|launch__(registers_per_thread|shared_mem_per_block_\w+|waves_per_multiprocessor"
    r"|occupancy_limit_\w+)"
    r"|derived__local_spilling_requests|sm__maximum_warps_per_active_cycle_pct"
    r"|sm__warps_active\.avg\.pct_of_peak_sustained_active"
    r"|sm__(pipe_(tensor|fma|alu)_cycles_active|inst_executed_pipe_(tensor|fma|alu|xu|lsu)\w*)"
    r"\.avg\.pct_of_peak_sustained_active"
    r"|l1tex__data_(pipe_lsu_wavefronts|bank_conflicts_pipe_lsu)_mem_shared(_op_ld|_op_st)?\.sum"
    r"|memory_l1_wavefronts_shared(_ideal)?|memory_l2_theoretical_sectors_global(_ideal)?"
    r"|smsp__inst_executed\.sum|smsp__inst_executed_op_\w+\.sum"
    r"|smsp__sass_inst_executed_op_\w+\.sum|sm__inst_executed_pipe_\w+\.sum"
    r"|smsp__sass_thread_inst_executed_op_f(fma|add|mul)_pred_on\.sum\.per_cycle_elapsed"
    r"|smsp__cycles_elapsed\.(avg|max|sum)|smsp__inst_issued\.sum"
    r"|smsp__sass_average_data_bytes_per_sector_mem_global_op_(ld|st)\.ratio"
    r"|smsp__average_warp(s_issue_stalled_\w+_per_issue_active|_latency_per_inst_issued)\.ratio)$"
)
_SECTIONS = (
    *("LaunchStats", "Occupancy", "SourceCounters", "WarpStateStats"),
    "MemoryWorkloadAnalysis",  # requests of spilled registers
)
_ACTIVE = ".avg.pct_of_peak_sustained_active"
_METRICS = (
    *("gpu__time_duration.sum", "gpc__cycles_elapsed.max", "gpc__cycles_elapsed.avg.per_second"),
    *("dram__bytes_read.sum", "dram__bytes_write.sum"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    *(f"lts__t_sectors{part}.sum" for part in ("", "_srcunit_tex")),
    *(f"lts__t_sectors_srcunit_tex_op_{side}.sum" for side in ("read", "write")),
    *("lts__t_sector_hit_rate.pct", "l1tex__t_sector_hit_rate.pct"),
    *(
        f"l1tex__data_{what}_mem_shared{side}.sum"
        for what in ("pipe_lsu_wavefronts", "bank_conflicts_pipe_lsu")
        for side in ("", "_op_ld", "_op_st")
    ),
    *(f"sm__pipe_{pipe}_cycles_active{_ACTIVE}" for pipe in ("tensor", "fma", "alu")),
    *(f"sm__inst_executed_pipe_{pipe}{_ACTIVE}" for pipe in ("xu", "lsu")),
    *("smsp__inst_executed.sum", "smsp__cycles_elapsed.avg"),
    *(
        f"smsp__sass_thread_inst_executed_op_{op}_pred_on.sum.per_cycle_elapsed"
        for op in ("ffma", "fmul", "fadd")
    ),
    *(
        f"smsp__sass_inst_executed_op_{space}_{side}.sum"
        for space in ("shared", "local", "global")
        for side in ("ld", "st")
    ),
)
_NCU_TIMEOUT_S = 300.0


class RecordingError(RuntimeError):
    """A preset could not be recorded at all; the message says why."""


@dataclass(frozen=True)
class Variant:
    """One recorded variant, as the manifest holds it.

    Attributes:
        gate: "ok", or why the output is not right, or why there is none.
        ms, host_ms: kernel time by CUDA-graph replay and the host's cost of an eager call, both
            without the profiler; None where they could not be had.
        ms_all, aa_spread, sm_clock_mhz, power_w: of `ms`, as in every record.
    """

    name: str
    trace: str | None
    gate: str
    error: float | None = None
    allowed_error: float | None = None
    ms: float | None = None
    ms_all: tuple[float, ...] = ()
    aa_spread: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    host_ms: float | None = None


def record_profiling_article(
    folder: Path, *, seed: int = 0, rounds: int = 12, say: Callable[[str], None] = lambda _: None
) -> list[Variant]:
    """Write a trace of every variant and the manifest into `folder`.

    A variant that cannot run here (a peer that is not installed) is in the manifest with the
    reason. Raises RecordingError without a GPU.
    """
    if not torch.cuda.is_available():
        raise RecordingError(
            "the profiling article's variants need an NVIDIA GPU to be recorded on"
        )
    folder.mkdir(parents=True, exist_ok=True)
    inputs = make_inputs(ARTICLE, "cuda", seed, backward=False)
    reference = cell_reference(inputs)
    calls: dict[str, Callable[[], object]] = {}
    drafts: dict[str, dict[str, Any]] = {}
    for name in (*EXHIBITS, *PEERS, "flashdig"):
        say(name)
        try:
            prepared = _prepare(name, inputs)
            call = prepared.forward()
            drafts[name] = _gated(prepared, call, reference)
        except Exception as error:  # whatever a library raises is why it was not recorded
            drafts[name] = {"gate": f"not run: {_first_line(error)}"}
            continue
        if drafts[name]["gate"] == "ok":
            trace = f"{name}.json.gz"
            record_steps(folder / trace, call)
            drafts[name]["trace"] = trace
            calls[name] = call
    say("timing")
    _add_times(drafts, calls, rounds)
    variants = [Variant(name=name, **{"trace": None, **draft}) for name, draft in drafts.items()]
    write_manifest(folder, "profiling-article", variants)
    return variants


def record_archaeology(
    folder: Path, *, seed: int = 0, rounds: int = 12, say: Callable[[str], None] = lambda _: None
) -> list[Variant]:
    """Write a trace of each exhibit, the counters of all and the manifest into `folder`.

    Raises RecordingError without a GPU, and where Nsight Compute is missing or not permitted.
    """
    if not torch.cuda.is_available():
        raise RecordingError("the exhibits need an NVIDIA GPU to be recorded on")
    folder.mkdir(parents=True, exist_ok=True)
    batch, heads, seqlen, head_dim = DUG_SHAPE
    cell = Cell(batch, heads, heads, seqlen, seqlen, head_dim, head_dim, "float32")
    inputs = make_inputs(cell, "cuda", seed, backward=False)
    reference = cell_reference(inputs)
    calls: dict[str, Callable[[], object]] = {}
    drafts: dict[str, dict[str, Any]] = {}
    for name in DUG:
        say(name)
        prepared = _exhibit(name, inputs)
        call = prepared.forward()
        drafts[name] = _gated(prepared, call, reference)
        if drafts[name]["gate"] == "ok":
            drafts[name]["trace"] = f"{name}.json.gz"
            record_steps(folder / drafts[name]["trace"], call)
            calls[name] = call
    say("timing")
    _add_times(drafts, calls, rounds)
    say("counting")
    q, k, v = (x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v))
    count_exhibits(DUG, (q, k, v), folder / COUNTERS)
    variants = [Variant(name=name, **{"trace": None, **draft}) for name, draft in drafts.items()]
    write_manifest(folder, "archaeology", variants)
    return variants


def record_steps(path: Path, call: Callable[[], object], steps: int = STEPS) -> None:
    """Warm up, then record a few steps, each in a range and waited for."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    with record(path, memory=False, flops=False):
        for _ in range(steps):
            with torch.profiler.record_function(RANGE):
                call()
            torch.cuda.synchronize()


def write_manifest(folder: Path, preset: str, variants: Sequence[Variant]) -> None:
    content = {
        "preset": preset,
        "environment": collect(),
        "revision": revision(),
        "variants": [vars(variant) for variant in variants],
    }
    (folder / MANIFEST).write_text(json.dumps(content) + "\n")


def count_exhibits(
    names: Sequence[str], tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], path: Path
) -> None:
    """Nsight Compute on one call of each exhibit; the columns of use, compressed.

    Raises RecordingError, saying why, when nothing was counted.
    """
    ncu = find_ncu()
    if ncu is None:
        raise RecordingError("Nsight Compute (ncu) is not on the PATH")
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="flashdig-preset-") as folder:
        table = Path(folder, "counters.csv")
        request = {"names": list(names), "device": "cuda", "causal": False, "tf32": False}
        Path(folder, "request.json").write_text(json.dumps(request))
        q, k, v = tensors
        torch.save({"q": q, "k": k, "v": v}, Path(folder, "inputs.pt"))
        command = [
            ncu,
            *(word for section in _SECTIONS for word in ("--section", section)),
            *("--metrics", ",".join(_METRICS)),
            *("--profile-from-start", "off", "--nvtx"),
            *("--clock-control", "none", "--cache-control", "all", "--target-processes", "all"),
            *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)),
        ]
        try:
            run_worker(
                "flashdig.evidence.counters_worker",
                folder,
                timeout_s=_NCU_TIMEOUT_S,
                environment={},
                under=command,
            )
        except subprocess.TimeoutExpired as error:
            raise RecordingError(f"Nsight Compute took longer than {_NCU_TIMEOUT_S:g} s") from error
        log = Path(folder, LOG).read_text(errors="replace")
        if not table.is_file() or NO_PERMISSION in table.read_text(errors="replace") + log:
            last = log.strip().splitlines()[-1:] or ["it printed nothing"]
            raise RecordingError(f"Nsight Compute counted nothing: {last[0]}")
        keep_columns(table, path)


def keep_columns(table: Path, path: Path) -> None:
    """Copy a raw page of Nsight Compute, compressed, with the columns that are of use."""
    with table.open(newline="", errors="replace") as source:
        rows = [row for row in csv.reader(source) if row and not row[0].startswith("==")]
    header = next(i for i, row in enumerate(rows) if "ID" in row and "Kernel Name" in row)
    kept = [i for i, name in enumerate(rows[header]) if _KEPT_COLUMNS.match(name)]
    with gzip.open(path, "wt", newline="") as target:
        writer = csv.writer(target, quoting=csv.QUOTE_ALL)
        for row in rows[header:]:
            if len(row) == len(rows[header]):
                writer.writerow([row[i] for i in kept])


def _prepare(name: str, inputs: CellInputs) -> Prepared:
    if name in EXHIBITS:
        return _exhibit(name, inputs)
    if name == "flashdig":
        (ours,) = ours_for(["auto"], inputs.cell, "cuda")
        return ours.prepare(inputs)
    competitor = peer(name)
    reason = competitor.reason_against(inputs.cell, "cuda")
    if reason is not None:
        raise RecordingError(reason)
    return competitor.prepare(inputs)


def _exhibit(name: str, inputs: CellInputs) -> Prepared:
    exhibit, causal = generation(name), bool(inputs.cell.causal)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = exhibit.run(q, k, v, causal)[0]
        return out

    q, k, v = (x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v))
    return Prepared(attention, (q, k, v), dout=None, to_common=lambda x: x.transpose(1, 2))


def _gated(prepared: Prepared, call: Callable[[], Any], reference: CellReference) -> dict[str, Any]:
    result = reference.check({"out": prepared.to_common(call())})
    return {
        "gate": result.reason if not result.ok else "ok",
        "error": result.error,
        "allowed_error": result.budget,
    }


def _add_times(
    drafts: dict[str, dict[str, Any]], calls: Mapping[str, Callable[[], object]], rounds: int
) -> None:
    """Kernel time by graph replay and host time by eager calls, in rotated rounds."""
    if not calls:
        return
    for name, found in time_rotated(calls, rounds=rounds).items():
        if isinstance(found, Timing):
            drafts[name] |= {
                "ms": found.ms,
                "ms_all": found.ms_all,
                "aa_spread": found.aa_spread,
                "sm_clock_mhz": found.sm_clock_mhz,
                "power_w": found.power_w,
            }
    for name, found in time_rotated(calls, rounds=rounds, clock="host").items():
        if isinstance(found, Timing):
            drafts[name]["host_ms"] = found.ms


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
