"""The committed records: what was promised against what was gained, and the articles' pages."""

import re
from pathlib import Path

import pytest

import flashdig
from flashdig.bench.results import Row, read_record
from flashdig.findings import find_in_trace
from flashdig.findings.explanation import UNEXPLAINED
from flashdig.findings.presets import ARTICLE_PRESETS
from flashdig.findings.study import guesses_of, study_preset
from flashdig.hardware.devices import find_device
from flashdig.readers.files import read_traces
from flashdig.report.explain_page import render_explain_page
from tests.trace_files import recorded

ROOT = Path(flashdig.__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
RECORDINGS = ROOT / "benchmarks" / "recordings"
STEPS = 3
# rule whose advice was taken -> case of benchmarks/record_findings.py, or variants of the article
PAIRS = {
    "copy-before-kernel": "contiguous",
    "repeated-heads": "repeated_heads",
    "products-on-cuda-cores": "float32_products",
    "float32-attention": "float32_attention",
    "decode-without-split": "decode",
    "launch-bound": "launch_bound",
    "mask-rebuilt": "mask_in_every_call",
}
VARIANTS = {
    "hidden-mask-copy": ("naive", "inplace"),
    "unfused-attention": ("naive", "sdpa_cudnn"),
    "math-fallback": ("sdpa_math", "sdpa_cudnn"),
    "slower-backend": ("sdpa_flash", "sdpa_cudnn"),
}


def latest(name: str) -> dict[str, Row]:
    record = read_record(RESULTS / f"{name}.json")
    return {row["name"]: row for row in record.rows_of(record.latest_run().run_id)}


def promised_and_gained_us(rule: str) -> tuple[float, float]:
    """Of one step: by the finding on the recording before the advice, and by both timings."""
    if rule in PAIRS:
        file = recorded(f"findings/{PAIRS[rule]}.before")
        rows, names = latest("findings"), [f"{PAIRS[rule]}.{side}" for side in ("before", "after")]
    else:
        file = str(RECORDINGS / "profiling-article" / f"{VARIANTS[rule][0]}.json.gz")
        rows, names = latest("profiling-article"), list(VARIANTS[rule])
    (trace,) = read_traces([file])
    (finding,) = [found for found in find_in_trace(trace) if found.rule == rule]
    assert finding.gain is not None
    before, after = (rows[name]["ms"] for name in names)
    return finding.gain.seconds / STEPS * 1e6, 1e3 * (before - after)


@pytest.mark.parametrize("rule", [*PAIRS, *VARIANTS])
def test_a_promise_holds_within_30_percent(rule) -> None:
    promised, gained = promised_and_gained_us(rule)
    assert promised == pytest.approx(gained, rel=0.3)


def test_the_document_quotes_promises_and_gains() -> None:
    text = (ROOT / "docs" / "findings.md").read_text()
    quoted = dict(re.findall(r"^\| `([a-z0-9-]+)` \| ([0-9.]+ µs \| [0-9.]+ µs) \|", text, re.M))
    expected = {}
    for rule in (*PAIRS, *VARIANTS):
        promised, gained = promised_and_gained_us(rule)
        expected[rule] = f"{promised:.4g} µs | {gained:.4g} µs"
    assert quoted == expected


@pytest.mark.parametrize("name", ARTICLE_PRESETS)
def test_the_page_is_drawn_from_the_recordings(name) -> None:
    preset, device = ARTICLE_PRESETS[name], find_device("h200")
    guesses = guesses_of(preset, device)
    page = (ROOT / "docs" / "reports" / f"{name}.html").read_text()
    (written,) = re.findall(r"written down at (\S+), before", page)
    study = study_preset(preset, RECORDINGS / name, guesses, written, device)
    assert render_explain_page(study, guesses) == page


def test_the_profiling_article_on_an_h200() -> None:
    """Kernel counts, the copy, the fallback's parts and the occupancies, each from a rule."""
    rows = latest("profiling-article")
    assert list(rows) == list(ARTICLE_PRESETS["profiling-article"].variants)
    assert all(row["gate"] == "ok" for row in rows.values())
    found = {name: {f["rule"] for f in row["findings"]} for name, row in rows.items()}
    assert "hidden-mask-copy" in found["naive"]
    assert "hidden-mask-copy" not in found["inplace"]
    parts = {"math-fallback", "safe-softmax", "mask-rebuilt", "products-on-cuda-cores"}
    assert parts <= found["sdpa_math"]
    assert "occupancy-by-design" in found["sdpa_flash"]
    for name in ("sdpa_cudnn", "fa3", "fa4", "flex"):
        assert "occupancy-not-measured" in found[name], name
    assert "cudnn-planning" in found["sdpa_cudnn"]
    kernels = {
        name: next(r["found"] for r in row["explained"][0]["rows"] if r["what"] == "kernels")
        for name, row in rows.items()
    }
    assert (kernels["naive"], kernels["inplace"], kernels["sdpa_math"]) == (5, 5, 20)
    assert {kernels[name] for name in ("sdpa_efficient", "sdpa_flash", "sdpa_cudnn")} == {1}


def test_archaeology_on_an_h200() -> None:
    """v2's bank conflicts as the article found them, and none once K is transposed."""
    rows = latest("archaeology")
    assert all(row["gate"] == "ok" for row in rows.values())
    counted = {
        name: {r["what"]: r for r in row["explained"][-1]["rows"]} for name, row in rows.items()
    }
    for name in ("v1", "v2", "v2_transposed"):
        assert counted[name]["bytes at memory"]["ratio"] == pytest.approx(1.0, abs=0.05), name
    assert counted["v2"]["bank conflicts"]["found"] == pytest.approx(63.64, abs=1.0)
    assert counted["v2"]["bank conflicts"]["rule"] == "bank-conflicts"
    assert counted["v2_transposed"]["bank conflicts"]["found"] < 2
    # products: two multiply-adds a pair and dimension, and those of the rescaling
    for name in ("v2", "v2_transposed"):
        assert counted[name]["multiply-adds of a lane"]["ratio"] == pytest.approx(1.0, abs=0.25)


def test_most_surprises_have_a_cause() -> None:
    for name in ARTICLE_PRESETS:
        surprises = [
            r
            for row in latest(name).values()
            for one in row["explained"]
            for r in one["rows"]
            if r["surprise"]
        ]
        known = [r for r in surprises if r["cause"] != UNEXPLAINED]
        assert len(known) >= 0.7 * len(surprises), name
