"""Rules over counters of memory: banks of shared memory, bytes and sectors of device memory."""

from __future__ import annotations

from flashdig.costs.efficiency import efficiency
from flashdig.costs.units import percent, with_unit
from flashdig.findings.counted import Counted
from flashdig.findings.finding import Advice, Finding, Number, Verdict

# the archaeology article's own limit
BANK_CONFLICT_LIMIT = 0.10
_TRAFFIC_LIMIT = 1.25
_SECTOR_LIMIT = 1.15
# part of the cycles from which on the shared-memory stage can be what a kernel waits for
_BUSY_STAGE = 0.5


def bank_conflicts(counted: Counted) -> list[Finding]:
    """Lanes of a warp that want different words of one bank, and take turns."""
    kernel, shared = counted.kernel, counted.kernel.shared
    share = shared.conflict_share
    slow_down = shared.source_slow_down or shared.slow_down
    if share is None or slow_down is None or share <= BANK_CONFLICT_LIMIT:
        return []
    if slow_down < 1.1:  # the hardware's count holds waits for the other unit as well
        return []
    loads, stores = shared.load_bank_conflicts or 0, shared.store_bank_conflicts or 0
    side = "loads" if loads >= stores else "stores"
    likely = (
        "a tile that is read along the dimension in which its rows lie apart, such as K transposed"
        if side == "loads"
        else "a tile that is stored in one order to be read in another"
    )
    numbers = [
        Number(
            "wavefronts",
            shared.wavefronts or 0,
            "count",
            counted.place("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"),
        ),
        Number(
            "bank conflicts",
            shared.bank_conflicts or 0,
            "count",
            counted.place("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"),
        ),
        Number("wavefronts by ideal ones", slow_down, "ratio"),
    ]
    requests = kernel.metric(
        f"smsp__sass_inst_executed_op_shared_{'ld' if loads >= stores else 'st'}.sum"
    )
    wavefronts = shared.load_wavefronts if loads >= stores else shared.store_wavefronts
    ways = ""
    if requests and wavefronts:
        ways = f"; a request of the {side} takes {wavefronts / requests:.3g} wavefronts"
        numbers.append(Number(f"wavefronts a request, {side}", wavefronts / requests, "ratio"))
    used = _stage_use(counted)
    gain, cost = None, ""
    verdict: Verdict = "check"
    if used is not None and used < _BUSY_STAGE:
        verdict = "fine"
        cost = (
            f" The shared-memory stage is busy for {percent(used)} of the time: they cost little."
        )
    elif used is not None:
        verdict = "slow"
        gain = counted.gain(
            (kernel.duration_ns or 0) / 1e9 * min(1.0, used) * (1 - 1 / slow_down),
            f"the shared-memory stage is busy for {percent(min(1.0, used))} of the cycles",
        )
    return [
        Finding(
            rule="bank-conflicts",
            verdict=verdict,
            claim=(
                f"{percent(share)} of the shared-memory wavefronts are bank conflicts (limit: "
                f"{percent(BANK_CONFLICT_LIMIT)}), most of them in {side}: accesses take "
                f"{slow_down:.3g} times what they need{ways}. Likely {likely}.{cost}"
            ),
            where=counted.subject,
            numbers=tuple(numbers),
            gain=gain,
            advice=Advice(
                "Store the tile in the order in which it is read (transpose K beforehand), swizzle "
                "it, or pad its rows by one word.",
                "k_transposed = k.transpose(-2, -1).contiguous()",
                ("k",),
            ),
            confidence="likely",
        )
    ]


def _stage_use(counted: Counted) -> float | None:
    """Part of the cycles in which the shared-memory stage of an SM has a wavefront."""
    wavefronts, cycles = counted.kernel.shared.wavefronts, counted.kernel.cycles
    if counted.device is None or not wavefronts or not cycles:
        return None
    return wavefronts / (counted.device.sm_count * cycles)


def traffic_above_model(counted: Counted) -> list[Finding]:
    """Device memory moved more than the model of the kernel says."""
    kernel, guess = counted.kernel, counted.guess
    if guess is None or kernel.dram_bytes is None:
        return []
    modelled = guess.memory.total_bytes
    if modelled == 0 or kernel.dram_bytes < _TRAFFIC_LIMIT * modelled:
        return []
    extra = kernel.dram_bytes - modelled
    gain = None
    limit = kernel.dram_percent
    if counted.device is not None and limit is not None and limit > 60:
        rate = counted.device.memory_bytes_per_s * efficiency(counted.device, "float32").copy
        gain = counted.gain(extra / rate, "the extra bytes at the chip's copy rate")
    return [
        Finding(
            rule="traffic-above-model",
            verdict="slow" if gain is not None else "check",
            claim=(
                f"Device memory moved {with_unit(kernel.dram_bytes, 'B')}, "
                f"{kernel.dram_bytes / modelled:.3g} times the {with_unit(modelled, 'B')} that the "
                "model expects behind the cache"
                + (f"; memory is busy for {limit:.3g} % of the time." if limit is not None else ".")
            ),
            where=counted.subject,
            numbers=(
                Number(
                    "bytes read",
                    kernel.dram_read_bytes or 0,
                    "bytes",
                    counted.place("dram__bytes_read.sum"),
                ),
                Number(
                    "bytes written",
                    kernel.dram_write_bytes or 0,
                    "bytes",
                    counted.place("dram__bytes_write.sum"),
                ),
                Number("modelled", modelled, "bytes"),
            ),
            gain=gain,
            confidence="likely",
        )
    ]


def uncoalesced(counted: Counted) -> list[Finding]:
    """Global accesses that touch more 32-byte sectors than their bytes need."""
    kernel = counted.kernel
    ideal = kernel.metric("memory_l2_theoretical_sectors_global_ideal")
    real = kernel.metric("memory_l2_theoretical_sectors_global")
    if not ideal or not real or real < _SECTOR_LIMIT * ideal:
        return []
    useful = kernel.metric("smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio")
    of_each = (
        "" if useful is None else f" ({useful:.3g} of each sector's 32 bytes are used by loads)"
    )
    return [
        Finding(
            rule="misaligned-accesses",
            verdict="slow",
            claim=(
                f"Global loads and stores touch {real / ideal:.3g} times the sectors that their "
                f"bytes need{of_each}: rows do not begin at 128-byte lines, or neighbouring lanes "
                "read apart from each other."
            ),
            where=counted.subject,
            numbers=(
                Number(
                    "sectors", real, "count", counted.place("memory_l2_theoretical_sectors_global")
                ),
                Number(
                    "sectors of ideal accesses",
                    ideal,
                    "count",
                    counted.place("memory_l2_theoretical_sectors_global_ideal"),
                ),
            ),
            advice=Advice(
                "Let rows begin at multiples of 128 bytes and neighbouring lanes read neighbouring "
                "words."
            ),
            confidence="likely",
        )
    ]
