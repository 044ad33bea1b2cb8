"""From metrics to NcuKernel: which counter says what.

Names are those of the raw page (`--page raw`), the same as in reports; where only a details page
was saved, its labels stand in for them. Of several names the first one that the file has is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from flashdig.readers.ncu_model import (
    Metrics,
    NcuKernel,
    NcuOccupancy,
    Pipes,
    Rule,
    SharedMemory,
    Stalls,
)

SECTOR_BYTES = 32  # a sector is a quarter of a 128-byte cache line

_ACTIVE = ".avg.pct_of_peak_sustained_active"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
_STALL_CYCLES = re.compile(
    r"^smsp__average_warps?(?:_latency)?_issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio$"
)
_STALL_PERCENT = re.compile(r"^smsp__warp_issue_stalled_(\w+?)_per_warp_active\.pct$")
_BLOCK_LIMITS = {
    "barriers": ("launch__occupancy_limit_barriers", "Block Limit Barriers"),
    "blocks": ("launch__occupancy_limit_blocks", "Block Limit SM"),
    "registers": ("launch__occupancy_limit_registers", "Block Limit Registers"),
    "shared_memory": ("launch__occupancy_limit_shared_mem", "Block Limit Shared Mem"),
    "warps": ("launch__occupancy_limit_warps", "Block Limit Warps"),
}


def kernel_from_metrics(
    *,
    number: int,
    name: str,
    source: str,
    metrics: Metrics,
    grid: tuple[int, int, int] | None = None,
    block: tuple[int, int, int] | None = None,
    device: int | None = None,
    compute_capability: tuple[int, int] | None = None,
    rules: tuple[Rule, ...] = (),
    ranges: tuple[str, ...] = (),
) -> NcuKernel:
    """An NcuKernel from its metrics, numbers in base units."""
    look = _Look(metrics)
    seconds = look.number("gpu__time_duration.sum", "gpu__time_duration.avg", "Duration")
    dram_read = look.number("dram__bytes_read.sum")
    dram_write = look.number("dram__bytes_write.sum")
    return NcuKernel(
        number=number,
        name=name,
        source=source,
        grid=grid,
        block=block,
        device=device,
        compute_capability=compute_capability,
        metrics=metrics,
        duration_ns=None if seconds is None else round(seconds * 1e9, 3),
        cycles=look.number("gpc__cycles_elapsed.max", "sm__cycles_elapsed.max", "Elapsed Cycles"),
        sm_frequency_hz=look.number(
            "gpc__cycles_elapsed.avg.per_second",
            "gpc__cycles_elapsed.max.per_second",
            "sm__cycles_elapsed.max.per_second",
            "SM Frequency",
        ),
        dram_read_bytes=dram_read,
        dram_write_bytes=dram_write,
        dram_bytes=_dram_bytes(look, dram_read, dram_write, seconds),
        dram_percent=look.number(
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
            "DRAM Throughput",
        ),
        l2_bytes=look.bytes("lts__t_bytes.sum", "lts__t_sectors.sum"),
        l2_from_sms_bytes=look.bytes(
            "lts__t_bytes_srcunit_tex.sum", "lts__t_sectors_srcunit_tex.sum"
        ),
        l2_read_bytes=look.bytes(
            "lts__t_bytes_srcunit_tex_op_read.sum", "lts__t_sectors_srcunit_tex_op_read.sum"
        ),
        l2_write_bytes=look.bytes(
            "lts__t_bytes_srcunit_tex_op_write.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
        ),
        l2_hit_percent=look.number("lts__t_sector_hit_rate.pct", "L2 Hit Rate"),
        l1_hit_percent=look.number("l1tex__t_sector_hit_rate.pct", "L1/TEX Hit Rate"),
        registers_per_thread=look.whole("launch__registers_per_thread", "Registers Per Thread"),
        shared_memory_dynamic_bytes=look.whole(
            "launch__shared_mem_per_block_dynamic", "Dynamic Shared Memory Per Block"
        ),
        shared_memory_static_bytes=look.whole(
            "launch__shared_mem_per_block_static", "Static Shared Memory Per Block"
        ),
        shared_memory_driver_bytes=look.whole(
            "launch__shared_mem_per_block_driver", "Driver Shared Memory Per Block"
        ),
        local_spill_requests=look.number(
            "derived__local_spilling_requests", "Local Memory Spilling Requests"
        ),
        waves=look.number("launch__waves_per_multiprocessor", "Waves Per SM"),
        pipes=_pipes(look),
        shared=_shared_memory(look),
        stalls=_stalls(metrics, look),
        occupancy=_occupancy(look),
        rules=rules,
        ranges=ranges,
    )


class _Look:
    """Metrics by the first of several names."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def number(self, *names: str) -> float | None:
        for name in names:
            value = self.metrics.get(name)
            if isinstance(value, float):
                return value
        return None

    def whole(self, *names: str) -> int | None:
        value = self.number(*names)
        return None if value is None else round(value)

    def bytes(self, in_bytes: str, in_sectors: str) -> float | None:
        value = self.number(in_bytes)
        sectors = self.number(in_sectors)
        if value is None and sectors is not None:
            return sectors * SECTOR_BYTES
        return value


def _dram_bytes(
    look: _Look, read: float | None, write: float | None, seconds: float | None
) -> float | None:
    if read is not None and write is not None:
        return read + write
    total = look.number("dram__bytes.sum")
    if total is not None:
        return total
    # the details page has only the rate of the memory workload section, in three digits
    rate = look.number("dram__bytes.sum.per_second", "Memory Workload Analysis: Memory Throughput")
    return rate * seconds if rate is not None and seconds is not None else None


def _pipes(look: _Look) -> Pipes:
    return Pipes(
        tensor=look.number(
            "sm__pipe_tensor_cycles_active" + _ACTIVE,
            "sm__pipe_tensor_op_hmma_cycles_active" + _ACTIVE,
            "sm__inst_executed_pipe_tensor" + _ACTIVE,
        ),
        fma=look.number(
            "sm__pipe_fma_cycles_active" + _ACTIVE, "sm__inst_executed_pipe_fma" + _ACTIVE
        ),
        alu=look.number(
            "sm__pipe_alu_cycles_active" + _ACTIVE, "sm__inst_executed_pipe_alu" + _ACTIVE
        ),
        xu=look.number("sm__inst_executed_pipe_xu" + _ACTIVE),
        lsu=look.number("sm__inst_executed_pipe_lsu" + _ACTIVE),
        fp64=look.number(
            "sm__pipe_fp64_cycles_active" + _ACTIVE, "sm__inst_executed_pipe_fp64" + _ACTIVE
        ),
    )


def _shared_memory(look: _Look) -> SharedMemory:
    return SharedMemory(
        wavefronts=look.number(_WAVEFRONTS + ".sum"),
        bank_conflicts=look.number(_CONFLICTS + ".sum"),
        load_wavefronts=look.number(_WAVEFRONTS + "_op_ld.sum"),
        load_bank_conflicts=look.number(_CONFLICTS + "_op_ld.sum"),
        store_wavefronts=look.number(_WAVEFRONTS + "_op_st.sum"),
        store_bank_conflicts=look.number(_CONFLICTS + "_op_st.sum"),
        source_wavefronts=look.number("memory_l1_wavefronts_shared"),
        source_ideal_wavefronts=look.number("memory_l1_wavefronts_shared_ideal"),
    )


def _stalls(metrics: Metrics, look: _Look) -> Stalls:
    cycles: dict[str, float] = {}
    shares: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(value, float):
            continue
        if found := _STALL_CYCLES.match(name):
            cycles[found.group(1)] = value
        elif found := _STALL_PERCENT.match(name):
            shares[found.group(1)] = value / 100
    return Stalls(
        cycles=cycles,
        shares=shares,
        latency=look.number(
            "smsp__average_warp_latency_per_inst_issued.ratio",
            "smsp__average_warps_active_per_inst_executed.ratio",
            "Warp Cycles Per Issued Instruction",
        ),
    )


def _occupancy(look: _Look) -> NcuOccupancy:
    limits: Mapping[str, int | None] = {
        resource: look.whole(*names) for resource, names in _BLOCK_LIMITS.items()
    }
    return NcuOccupancy(
        achieved_percent=look.number(
            "sm__warps_active.avg.pct_of_peak_sustained_active", "Achieved Occupancy"
        ),
        theoretical_percent=look.number(
            "sm__maximum_warps_per_active_cycle_pct", "Theoretical Occupancy"
        ),
        block_limits={name: limit for name, limit in limits.items() if limit is not None},
    )
