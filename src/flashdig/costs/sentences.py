"""A prediction in words."""

from __future__ import annotations

from flashdig.costs.prediction import Prediction
from flashdig.costs.roofline import MEMORY
from flashdig.costs.units import percent, seconds, with_unit
from flashdig.hardware.devices import Device


def describe(guess: Prediction, device: Device) -> tuple[str, ...]:
    """What the guess says: times, limiter, bytes, grid, and what could make it wrong."""
    if guess.flops == 0:
        return ("Nothing is visible: there is no work.",)
    said = [_times(guess), _floor(guess), _traffic(guess, device)]
    said += _grid(guess, device)
    said += _warnings(guess, device)
    return tuple(said)


def _times(guess: Prediction) -> str:
    rate = with_unit(guess.expected_flop_per_s, "FLOP/s")
    if guess.direction == "decode":
        moved = guess.memory.total_bytes / guess.expected_s
        rate = f"{with_unit(moved, 'B/s')} of keys and values"
    return (
        f"Expected {seconds(guess.expected_s)} ({rate}), held back by {guess.expected_limiter}; "
        f"no run is faster than {seconds(guess.floor_s)}."
    )


def _floor(guess: Prediction) -> str:
    parts = [f"{name} {seconds(time)}" for name, time in guess.roofs.by_name.items()]
    clock = f"{guess.floor_clock_hz / 1e9:.3g} GHz"
    text = f"At the specified peaks and {clock}: {', '.join(parts)}; {guess.limiter} set the floor."
    if guess.limiter == MEMORY:
        text = text.replace(" set the floor", " sets the floor")
    if guess.roofs.exp2_s is None:
        text += " The rate of exponentials of this chip is unknown."
    return text


def _traffic(guess: Prediction, device: Device) -> str:
    least, asked = guess.compulsory.total_bytes, guess.issued.total_bytes
    left = guess.memory.total_bytes
    if asked <= 1.05 * least:
        return f"Instructions ask for {with_unit(asked, 'B')}: about what any kernel must move."
    text = (
        f"Instructions ask for {with_unit(asked, 'B')}, {asked / least:.3g} times the "
        f"{with_unit(least, 'B')} that any kernel must move"
    )
    cache = with_unit(device.cache_bytes, "B")
    if left <= 1.05 * least:
        return f"{text}; the cache ({cache}) should serve all the rest."
    return f"{text}; behind the cache ({cache}) {with_unit(left, 'B')} should be left for memory."


def _grid(guess: Prediction, device: Device) -> list[str]:
    if guess.programs is None or guess.waves is None:
        return [f"{guess.kernels} kernels, each of which reads what the one before wrote."]
    if guess.programs < device.sm_count:
        idle = percent(1 - guess.programs / device.sm_count)
        return [
            f"The grid has {guess.programs} programs for {device.sm_count} SMs: {idle} of them idle"
            " throughout."
        ]
    text = f"The grid has {guess.programs:,} programs: {guess.waves:.3g} waves over the SMs"
    if guess.imbalance is not None and guess.imbalance > 1.05:
        text += f"; the longest has {guess.imbalance:.3g} times the mean work"
    return [f"{text}."]


def _warnings(guess: Prediction, device: Device) -> list[str]:
    said = []
    needed = guess.compulsory.total_bytes + guess.scratch_bytes
    if needed > device.memory_bytes:
        said.append(
            f"It does not fit: {with_unit(needed, 'B')} are needed, the chip has "
            f"{with_unit(device.memory_bytes, 'B')}."
        )
    if guess.limiter == MEMORY and guess.compulsory.total_bytes <= device.cache_bytes:
        said.append("All of it fits into the cache: a warm run can be faster than the floor says.")
    return said
