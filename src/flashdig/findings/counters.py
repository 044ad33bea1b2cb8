"""Rules over Nsight Compute's counters of one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

from flashdig.costs.units import percent, seconds
from flashdig.findings.counted import Counted
from flashdig.findings.counters_memory import bank_conflicts, traffic_above_model, uncoalesced
from flashdig.findings.finding import Advice, Finding, Number

_MIO_LIMIT = 0.25
_EXP2_LIMIT = 60.0
_SPILL_LIMIT = 0.05
# Nsight Compute's locked base clock lies below this part of the highest one
_LOW_CLOCK = 0.8
_LOW_OCCUPANCY = 50.0
_FFMA_LIMIT = 20.0
_FFMA_OF_FLOAT32 = 5.0


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
