"""Runs and rows of records, for tests of what records hold."""

from flashdig.bench.results import Run

STARTED = "2026-11-29T18:14:05+00:00"


def run(run_id="first", started=STARTED, **changes) -> Run:
    fields = {"environment": {"gpu": "NVIDIA H200"}, "command": "flashdig dig", "revision": "abc"}
    return Run(run_id, started=started, **{**fields, **changes})


PROBLEM = {
    "pass": "forward",
    "batch": 2,
    "num_heads": 8,
    "num_heads_kv": 2,
    "seqlen_q": 128,
    "seqlen_k": 256,
    "head_dim": 64,
    "head_dim_v": 64,
    "dtype": "bfloat16",
    "causal": True,
}
TIMED = {"ms": 0.5, "ms_all": [0.5, 0.4, 0.6], "aa_spread": 0.01, "clock": "graph", "l2": "warm"}
SPEED = {"kind": "speed", **PROBLEM, "backend": "v2", "gate": "ok", **TIMED}
RUNG = {"kind": "rung", **PROBLEM, "name": "v1", "gate": "ok"}
TEST = {"kind": "test", "cases": 3, "passed": 1, "failed": 1, "skipped": 1, "failures": ["why"]}
EXTRA = {
    "features": {"window": [3, None]},
    "tflops": 12.5,
    "tb_per_s": 1.5,
    "sm_clock_mhz": 1980.0,
    "power_w": None,
    "joules": 0.7,
    "tflop_per_joule": 0.9,
    "model": {"layers": 24},
    "losses": [10.9, 10.2],
    "tokens_per_s": 40_000.0,
    "mfu": 0.5,
    "mfu_causal_half": 0.45,
    "attention_ms": {"forward": 9.0},
    "tensor_utilisation": 0.7,
    "peak_bytes": 1 << 33,
    "error": 1e-4,
    "allowed_error": 3e-4,
    "rms_error": 4e-5,
    "eager_difference": 2e-3,
    "predicted": {"load_bytes": 7},
    "kernels": [{"name": "_fwd", "count": 1, "us": 3.5}, {"name": "copy", "count": 2, "us": None}],
    "surprises": [
        {"what": "time", "predicted": 1.0, "found": 2.0, "tolerance": 0.15, "cause": "unexplained"}
    ],
    "findings": [{"rule": "math-fallback", "verdict": "slow", "claim": "20 kernels."}],
    "explained": [{"subject": "math forward", "calls": 3, "guess": None, "rows": []}],
    "host_ms": 0.12,
    "share_of_matmul": 0.5,
    "share_of_copy": 0.1,
    "speedup": 4.6,
    "share_of_gain": -0.1,
    "counted": {
        "load_bytes": 1,
        "store_bytes": 2,
        "matmul_flops": None,
        "source": "interpreter",
    },
    "counters": {
        "dram_read_bytes": 5,
        "dram_write_bytes": 4,
        "l2_bytes": None,
        "cache": "cold",
        "source": "Nsight Compute 2026.1",
        "kernels": [
            {
                "name": "_fwd",
                "count": 1,
                "us": 3.5,
                "dram_read_bytes": 5,
                "dram_write_bytes": 4,
                "l2_bytes": None,
            }
        ],
    },
    "sentence": "QKᵀ stays in registers — that is all.",
    "preset": "archaeology",
    "fwd_bwd_ms": 1.5,
    "fwd_bwd_tflops": 10.0,
    "paper_tflops": 73,
    "notes": "line\nbreak",
}
