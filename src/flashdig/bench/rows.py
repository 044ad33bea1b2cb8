"""What a row of a record may hold: names, types and what goes together.

None stands for unknown and counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flashdig.problem import DTYPE_BYTES


class RecordError(ValueError):
    """A record, a run or a row is not what it should be; the message names the place."""


KINDS = ("speed", "rung", "step", "test")
PASSES = ("forward", "backward", "decode", "host", "training")
CLOCKS = ("graph", "events", "host")
L2_STATES = ("cold", "warm")

# (what is allowed, in words; whether a value is)
Rule = tuple[str, Callable[[Any], bool]]


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _one_of(*names: str) -> Rule:
    return f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names


KERNEL = {"name", "count", "us"}
# of the first launch under a name; copies and fills have none
LAUNCH = {"grid", "block", "registers", "shared_bytes", "occupancy_percent", "occupancy_limit"}
# by the chip's counters: of device memory, and what the SMs asked the L2 for
MEMORY_BYTES = {"dram_read_bytes", "dram_write_bytes", "l2_bytes"}
SURPRISE = {"what", "predicted", "found", "tolerance", "cause"}


def _is_kernel(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() >= KERNEL
        and value.keys() <= KERNEL | LAUNCH
        and _is_text(value["name"])
        and _is_count(value["count"])
        and (value["us"] is None or (_is_number(value["us"]) and value["us"] >= 0))
    )


def _is_surprise(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == SURPRISE
        and _is_text(value["what"])
        and _is_text(value["cause"])
        and all(_is_number(value[name]) for name in ("predicted", "found", "tolerance"))
    )


def _is_counted(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"load_bytes", "store_bytes", "matmul_flops", "source"}
        and _is_text(value["source"])
        and all(value[n] is None or _is_count(value[n]) for n in value if n != "source")
    )


def _is_counters(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == MEMORY_BYTES | {"cache", "source", "kernels"}
        and _has_memory_bytes(value)
        and value["cache"] in L2_STATES
        and _is_text(value["source"])
        and isinstance(value["kernels"], list)
        and bool(value["kernels"])
        and all(
            isinstance(kernel, dict)
            and kernel.keys() == MEMORY_BYTES | KERNEL
            and _has_memory_bytes(kernel)
            and _is_kernel({name: kernel[name] for name in KERNEL})
            for kernel in value["kernels"]
        )
    )


def _are_findings(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and all(_is_text(one.get(key)) for key in ("rule", "verdict", "claim"))
        for one in value
    )


def _is_explanation(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"subject", "calls", "guess", "rows"}
        and _is_text(value["subject"])
        and isinstance(value["rows"], list)
    )


def _has_memory_bytes(value: Mapping[str, Any]) -> bool:
    return (
        _is_count(value["dram_read_bytes"])
        and _is_count(value["dram_write_bytes"])
        and (value["l2_bytes"] is None or _is_count(value["l2_bytes"]))
    )


TEXT: Rule = ("a non-empty string", _is_text)
COUNT: Rule = ("an integer >= 0", _is_count)
AMOUNT: Rule = ("a finite number >= 0", lambda value: _is_number(value) and value >= 0)
DURATION: Rule = ("a finite number > 0", lambda value: _is_number(value) and value > 0)
OBJECT: Rule = ("an object", lambda value: isinstance(value, dict))

FIELDS: dict[str, Rule] = {
    "run_id": TEXT,
    "kind": _one_of(*KINDS),
    "pass": _one_of(*PASSES),
    "batch": COUNT,
    "num_heads": COUNT,
    "num_heads_kv": COUNT,
    "seqlen_q": COUNT,
    "seqlen_k": COUNT,
    "head_dim": COUNT,
    "head_dim_v": COUNT,
    "dtype": _one_of(*DTYPE_BYTES),
    "causal": (
        "true, false, 'bottom-right' or 'top-left'",
        lambda value: isinstance(value, bool) or value in ("bottom-right", "top-left"),
    ),
    "features": OBJECT,
    "backend": TEXT,
    "clock": _one_of(*CLOCKS),
    "l2": _one_of(*L2_STATES),
    "ms": DURATION,
    "ms_all": (
        "a non-empty list of finite numbers > 0",
        lambda value: isinstance(value, list) and bool(value) and all(map(DURATION[1], value)),
    ),
    "aa_spread": AMOUNT,
    "tflops": AMOUNT,
    "tb_per_s": AMOUNT,
    "sm_clock_mhz": AMOUNT,
    "power_w": AMOUNT,
    "joules": AMOUNT,
    "tflop_per_joule": AMOUNT,
    "tensor_utilisation": AMOUNT,
    "peak_bytes": COUNT,
    "error": AMOUNT,
    "allowed_error": AMOUNT,
    "rms_error": AMOUNT,
    "eager_difference": AMOUNT,
    "predicted": OBJECT,
    "gate": TEXT,
    "cases": COUNT,
    "passed": COUNT,
    "failed": COUNT,
    "skipped": COUNT,
    "failures": (
        "a list of non-empty strings",
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
    ),
    "name": TEXT,
    "kernels": (
        "a list of {name, count, us}",
        lambda value: isinstance(value, list) and all(map(_is_kernel, value)),
    ),
    "surprises": (
        "a list of {what, predicted, found, tolerance, cause}",
        lambda value: isinstance(value, list) and all(map(_is_surprise, value)),
    ),
    # of `flashdig explain`: conclusions, and guess against found with causes
    "findings": ("a list of {rule, verdict, claim, ...}", _are_findings),
    "explained": (
        "a list of {subject, calls, guess, rows}",
        lambda value: isinstance(value, list) and all(map(_is_explanation, value)),
    ),
    "host_ms": AMOUNT,
    "share_of_matmul": AMOUNT,
    "share_of_copy": AMOUNT,
    "speedup": AMOUNT,
    "share_of_gain": ("a finite number", _is_number),
    "counted": ("{load_bytes, store_bytes, matmul_flops, source}", _is_counted),
    "counters": (
        "{dram_read_bytes, dram_write_bytes, l2_bytes, cache, source, kernels}",
        _is_counters,
    ),
    "sentence": TEXT,
    "preset": TEXT,
    "fwd_bwd_ms": DURATION,
    "fwd_bwd_tflops": AMOUNT,
    "paper_tflops": AMOUNT,
    # of whole training steps
    "model": OBJECT,
    "losses": (
        "a list of finite numbers",
        lambda value: isinstance(value, list) and all(map(_is_number, value)),
    ),
    "tokens_per_s": AMOUNT,
    "mfu": AMOUNT,
    "mfu_causal_half": AMOUNT,
    "attention_ms": OBJECT,
    "notes": TEXT,
}

PROBLEM = (
    "pass",
    "batch",
    "num_heads",
    "num_heads_kv",
    "seqlen_q",
    "seqlen_k",
    "head_dim",
    "head_dim_v",
    "dtype",
    "causal",
)
REQUIRED = {
    "speed": (*PROBLEM, "backend", "gate"),
    "rung": (*PROBLEM, "name", "gate"),
    "step": (*PROBLEM, "name", "gate"),
    "test": ("cases", "passed", "failed", "skipped", "failures"),
}
# a time and how it was taken: all of them or none
TIMING = ("ms", "ms_all", "aa_spread", "clock", "l2")
# figures that come from a time
FROM_TIMING = (
    "tflops",
    "tb_per_s",
    "sm_clock_mhz",
    "power_w",
    "joules",
    "tflop_per_joule",
    "tensor_utilisation",
    "share_of_matmul",
    "share_of_copy",
    "speedup",
    "share_of_gain",
    "fwd_bwd_ms",
    "fwd_bwd_tflops",
    "tokens_per_s",
    "mfu",
    "mfu_causal_half",
)


def check_row(row: Any, run_ids: Collection[str], where: str) -> None:
    """Raise RecordError, naming `where` and the field, unless the row may stand in a record.

    A speed row without a time says why in `notes`; no row holds a speed without a gate that is
    "ok".
    """
    if not isinstance(row, dict):
        raise RecordError(f"{where} must be an object, got {row!r}")
    for name, value in row.items():
        if name not in FIELDS:
            raise RecordError(f"{where}: unknown field {name!r}")
        allowed, is_allowed = FIELDS[name]
        if value is not None and not is_allowed(value):
            raise RecordError(f"{where}: {name} must be {allowed}, got {value!r}")
        check_json(value, f"{where}: {name}")
    # first: in a file, a row without its run lacks what the run's rows share
    if row.get("run_id") is not None and row["run_id"] not in run_ids:
        raise RecordError(f"{where}: run_id {row['run_id']!r} is not a run of this record")
    _require(row, ("run_id", "kind"), where)
    _require(row, REQUIRED[row["kind"]], f"{where} ({row['kind']})")
    if row["kind"] == "test":
        _check_test_counts(row, where)
    else:
        _check_timing(row, where)


def _require(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    missing = [name for name in names if row.get(name) is None]
    if missing:
        raise RecordError(f"{where}: {', '.join(missing)} missing")


def _check_timing(row: Mapping[str, Any], where: str) -> None:
    timing = [name for name in TIMING if row.get(name) is not None]
    figures = [name for name in FROM_TIMING if row.get(name) is not None]
    if row["gate"] != "ok" and (timing or figures):
        named = ", ".join(timing + figures)
        raise RecordError(f"{where}: no speed without a gate that is 'ok', but it holds {named}")
    if timing and len(timing) < len(TIMING):
        raise RecordError(f"{where}: {', '.join(timing)} without {_others(timing)}")
    if figures and not timing:
        raise RecordError(f"{where}: {', '.join(figures)} without ms")
    if row["kind"] == "speed" and row["gate"] == "ok" and not timing and not row.get("notes"):
        raise RecordError(f"{where}: a speed row without ms must say why in notes")


def _others(timing: list[str]) -> str:
    return ", ".join(name for name in TIMING if name not in timing)


def _check_test_counts(row: Mapping[str, Any], where: str) -> None:
    if row["cases"] != row["passed"] + row["failed"] + row["skipped"]:
        raise RecordError(
            f"{where}: cases ({row['cases']}) must be passed + failed + skipped "
            f"({row['passed']} + {row['failed']} + {row['skipped']})"
        )
    if len(row["failures"]) != row["failed"]:
        raise RecordError(
            f"{where}: failures must list every failure: {row['failed']} failed, "
            f"{len(row['failures'])} listed"
        )


def check_json(value: Any, where: str) -> None:
    """Raise RecordError, naming the place, unless JSON gives the same value back."""
    if value is None or isinstance(value, bool | int):
        return
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise RecordError(f"{where} holds half a surrogate pair, which UTF-8 cannot store")
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecordError(f"{where} must be finite, got {value!r}")
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise RecordError(f"{where}: keys must be strings, got {name!r}")
            check_json(name, f"{where}: a key")
            check_json(inner, f"{where}.{name}")
        return
    if isinstance(value, list):
        for number, inner in enumerate(value):
            check_json(inner, f"{where}[{number}]")
        return
    raise RecordError(f"{where}: {type(value).__name__} cannot be stored as JSON")
