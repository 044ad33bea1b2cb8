"""Rules over Nsight Compute's counters of one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashdig.costs.efficiency import efficiency
from flashdig.costs.prediction import Prediction
from flashdig.costs.units import percent, seconds, with_unit
from flashdig.findings.finding import Advice, Finding, Gain, Number, Verdict
from flashdig.hardware.devices import Device
from flashdig.readers.ncu_model import NcuKernel

# the articles' own limits
BANK_CONFLICT_LIMIT = 0.10
_MIO_LIMIT = 0.25
_EXP2_LIMIT = 60.0
_TRAFFIC_LIMIT = 1.25
_SECTOR_LIMIT = 1.15
_SPILL_LIMIT = 0.05
# Nsight Compute's locked base clock lies below this part of the highest one
_LOW_CLOCK = 0.8
_LEAST_SHARE = 0.03
_BUSY_STAGE = 0.5
_LOW_OCCUPANCY = 50.0
_FFMA_LIMIT = 20.0
_FFMA_OF_FLOAT32 = 5.0


@dataclass(frozen=True)
class Counted:
    """One profiled kernel and what is known beside its counters.

    Attributes:
        share: of the time of all kernels in the file, 0 to 1.
        device: the chip; None where neither the file nor the caller says.
        guess: what was predicted for this kernel; None where its problem is not known.
        subject: what it is, in words.
    """

    kernel: NcuKernel
    share: float
    device: Device | None
    guess: Prediction | None
    subject: str

    def place(self, metric: str) -> str:
        return f"kernel {self.kernel.number}, {metric}"

    def gain(self, saved_s: float, basis: str) -> Gain | None:
        duration = (self.kernel.duration_ns or 0) / 1e9
        if saved_s <= 0 or not duration:
            return None
        return Gain(saved_s, self.share * saved_s / duration, "device", basis)


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


def register_spills(counted: Counted) -> list[Finding]:
    """Registers that went to memory and back."""
    kernel = counted.kernel
    requests = kernel.local_spill_requests
    instructions = kernel.metric("smsp__inst_executed.sum")
    if not requests or not instructions:
        return []
    share = requests / instructions
    few = share < _SPILL_LIMIT
    waiting = kernel.stalls.share("long_scoreboard")
    waits = "" if waiting is None else f", and warps wait for memory for {percent(waiting)}"
    return [
        Finding(
            rule="register-spills",
            device_ns=None if few or waiting is None else waiting * (kernel.duration_ns or 0),
            verdict="fine" if few else "slow",
            claim=(
                f"{requests:,.0f} memory requests come from spilled registers, "
                f"{percent(share)} of all instructions"
                + (
                    ": they cost at most that part of the issue slots."
                    if few
                    else f"{waits}. {kernel.registers_per_thread} registers a thread are not "
                    "enough for the tile."
                )
            ),
            where=counted.subject,
            numbers=(
                Number(
                    "spill requests",
                    requests,
                    "count",
                    counted.place("derived__local_spilling_requests"),
                ),
                Number(
                    "instructions", instructions, "count", counted.place("smsp__inst_executed.sum")
                ),
            ),
            advice=(
                None if few else Advice("Take a smaller tile, or more warps for the same tile.")
            ),
            confidence="certain" if not few else "likely",
        )
    ]


def mio_pressure(counted: Counted) -> list[Finding]:
    """Warps wait for the queue before shared memory and the special function unit."""
    stalls = counted.kernel.stalls
    throttle = stalls.share("mio_throttle") or 0.0
    short = stalls.share("short_scoreboard") or 0.0
    if throttle + short < _MIO_LIMIT:
        return []
    cycles = stalls.cycles.get("mio_throttle")
    largest = stalls.largest()
    leading = largest is not None and largest[0] in ("mio_throttle", "short_scoreboard")
    return [
        Finding(
            rule="mio-pressure",
            verdict="slow" if leading else "check",
            claim=(
                f"Warps spend {percent(throttle)} of their time before a full MIO queue and "
                f"{percent(short)} waiting for its results: shared memory and special functions "
                "(exp2) are issued faster than they are served."
            ),
            where=counted.subject,
            numbers=(
                Number(
                    "MIO throttle",
                    100 * throttle,
                    "percent",
                    counted.place("smsp__average_warps_issue_stalled_mio_throttle"),
                ),
                *(
                    [Number("cycles a warp waits between two instructions", cycles, "ratio")]
                    if cycles is not None
                    else []
                ),
            ),
            advice=Advice(
                "Wider shared-memory accesses, operands that stay in registers, or products that "
                "read shared memory themselves (tensor cores) take the pressure off."
            ),
            confidence="likely",
        )
    ]


def exp2_pressure(counted: Counted) -> list[Finding]:
    """The special function unit is what is busiest."""
    pipes = counted.kernel.pipes
    if pipes.xu is None or pipes.xu < _EXP2_LIMIT:
        return []
    others = [value for value in (pipes.tensor, pipes.fma, pipes.alu) if value is not None]
    if others and max(others) > pipes.xu:
        return []
    return [
        Finding(
            rule="exp2-pressure",
            verdict="slow",
            claim=(
                f"The special function unit is busy for {pipes.xu:.3g} % of the time, more than "
                "any other pipe: exponentials, not products, set the pace."
            ),
            where=counted.subject,
            numbers=(
                Number(
                    "special function unit",
                    pipes.xu,
                    "percent",
                    counted.place("sm__inst_executed_pipe_xu"),
                ),
                Number("tensor cores", pipes.tensor or 0, "percent"),
            ),
            advice=Advice(
                "Do part of the exponentials by a polynomial on the FMA pipe (as FlashAttention-4 "
                "does), or overlap them with the products of another tile."
            ),
            confidence="likely",
        )
    ]


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


def counted_occupancy(counted: Counted) -> list[Finding]:
    """Few resident warps, and what keeps more out."""
    kernel, occupancy = counted.kernel, counted.kernel.occupancy
    theoretical = occupancy.theoretical_percent
    if theoretical is None or theoretical >= _LOW_OCCUPANCY or not kernel.decoded.is_attention:
        return []
    warps = math.ceil(math.prod(kernel.block or (0,)) / 32)
    blocks = min(occupancy.block_limits.values(), default=0)
    if warps * blocks < 8:  # two warps for each of the four schedulers
        return []
    limiters = " and ".join(name.replace("_", " ") for name in occupancy.limiters)
    achieved = occupancy.achieved_percent
    shown = "" if achieved is None else f", {achieved:.3g} % achieved"
    return [
        Finding(
            rule="occupancy-by-design",
            verdict="fine",
            claim=(
                f"Theoretical occupancy is {theoretical:.4g} %{shown}: {limiters} let {blocks} "
                f"block{'s' if blocks > 1 else ''} of {warps} warps onto an SM. Each scheduler has "
                f"{warps * blocks / 4:.3g} warps; a kernel that reuses a tile needs no more, and "
                "'over 50 %' is not what it lacks."
            ),
            where=counted.subject,
            numbers=(
                Number(
                    "theoretical occupancy",
                    theoretical,
                    "percent",
                    counted.place("sm__maximum_warps_per_active_cycle_pct"),
                ),
                Number(
                    "registers a thread",
                    kernel.registers_per_thread or 0,
                    "count",
                    counted.place("launch__registers_per_thread"),
                ),
            ),
        )
    ]


def without_tensor_cores(counted: Counted) -> list[Finding]:
    """An attention kernel whose products run on the FMA pipe."""
    pipes = counted.kernel.pipes
    if not counted.kernel.decoded.is_attention or pipes.tensor is None or pipes.fma is None:
        return []
    in_float32 = counted.kernel.decoded.dtype == "float32"
    if pipes.tensor > 1.0 or pipes.fma < (_FFMA_OF_FLOAT32 if in_float32 else _FFMA_LIMIT):
        return []
    return [
        Finding(
            rule="without-tensor-cores",
            verdict="slow",
            claim=(
                f"The products run on the FMA pipe ({pipes.fma:.3g} % busy); the tensor cores do "
                "nothing. Float32 in IEEE precision has no tensor-core instruction."
            ),
            where=counted.subject,
            numbers=(
                Number("FMA pipe", pipes.fma, "percent", counted.place("sm__pipe_fma")),
                Number("tensor cores", pipes.tensor, "percent", counted.place("sm__pipe_tensor")),
            ),
            advice=Advice(
                "Use bfloat16 or float16, or allow TF32 where ten bits of mantissa are enough.",
                "q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))",
                ("torch", "q", "k", "v"),
            ),
        )
    ]


def counted_clock(counted: Counted) -> list[Finding]:
    """The SM clock of the counted run is not that of a normal one."""
    kernel, device = counted.kernel, counted.device
    if device is None or kernel.sm_frequency_hz is None:
        return []
    usual = device.highest_clock_hz
    if kernel.sm_frequency_hz > _LOW_CLOCK * usual or (kernel.duration_ns or 0) < 20_000:
        return []
    return [
        Finding(
            rule="counted-at-low-clock",
            verdict="not measured",
            claim=(
                f"The kernel was counted at {kernel.sm_frequency_hz / 1e9:.3g} GHz, where the chip "
                f"goes up to {usual / 1e9:.3g} GHz: Nsight Compute locks the clock to its "
                "base (--clock-control none leaves it), or power or heat held it down. Its "
                f"duration of {seconds((kernel.duration_ns or 0) / 1e9)} is not that of a normal "
                "run."
            ),
            where=counted.subject,
            numbers=(
                Number(
                    "SM clock",
                    kernel.sm_frequency_hz,
                    "Hz",
                    counted.place("gpc__cycles_elapsed.avg.per_second"),
                ),
            ),
            confidence="likely",
        )
    ]


COUNTER_RULES: dict[str, Callable[[Counted], list[Finding]]] = {
    "bank-conflicts": bank_conflicts,
    "register-spills": register_spills,
    "mio-pressure": mio_pressure,
    "exp2-pressure": exp2_pressure,
    "traffic-above-model": traffic_above_model,
    "misaligned-accesses": uncoalesced,
    "occupancy-by-design": counted_occupancy,
    "without-tensor-cores": without_tensor_cores,
    "counted-at-low-clock": counted_clock,
}


def counted_kernels(
    kernels: Sequence[NcuKernel],
    device: Device | None = None,
    guesses: Sequence[Prediction | None] = (),
    subjects: Sequence[str] = (),
) -> list[Counted]:
    """The kernels of a file that take part of its time, ready for the rules.

    Args:
        guesses, subjects: one a kernel, or none at all.
    """
    total = sum(kernel.duration_ns or 0 for kernel in kernels)
    found = []
    for at, kernel in enumerate(kernels):
        share = (kernel.duration_ns or 0) / total if total else 0.0
        if share < _LEAST_SHARE and total:
            continue
        found.append(
            Counted(
                kernel=kernel,
                share=share,
                device=device,
                guess=guesses[at] if at < len(guesses) else None,
                subject=(
                    subjects[at]
                    if at < len(subjects)
                    else f"kernel {kernel.number}: {kernel.decoded.words}"
                ),
            )
        )
    return found
