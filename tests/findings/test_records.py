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
# case of benchmarks/record_findings.py -> the rule whose advice was taken
ADVICE_TAKEN = {
    "contiguous": "copy-before-kernel",
    "repeated_heads": "repeated-heads",
    "float32_products": "products-on-cuda-cores",
    "float32_attention": "float32-attention",
    "decode": "decode-without-split",
    "launch_bound": "launch-bound",
    "mask_in_every_call": "mask-rebuilt",
    "strided_mask": "math-fallback",
    "fused": "unfused-attention",
}


def pairs() -> dict[str, Row]:
    record = read_record(RESULTS / "findings.json")
    return {row["name"]: row for row in record.rows_of(record.latest_run().run_id)}


def promised_us(case: str, rule: str) -> float:
    """Of one step, by the finding on the recording before the advice."""
    (trace,) = read_traces([recorded(f"findings/{case}.before")])
    (finding,) = [found for found in find_in_trace(trace) if found.rule == rule]
    assert finding.gain is not None
    return finding.gain.seconds / STEPS * 1e6


def gained_us(case: str) -> float:
    rows = pairs()
    return 1e3 * (rows[f"{case}.before"]["ms"] - rows[f"{case}.after"]["ms"])


@pytest.mark.parametrize("case", ADVICE_TAKEN)
def test_a_promise_holds_within_30_percent(case) -> None:
    promised, gained = promised_us(case, ADVICE_TAKEN[case]), gained_us(case)
    assert promised == pytest.approx(gained, rel=0.3)


def test_the_document_quotes_promises_and_gains() -> None:
    text = (ROOT / "docs" / "findings.md").read_text()
    quoted = dict(re.findall(r"^\| `([a-z0-9-]+)` \| ([0-9.]+ µs \| [0-9.]+ µs) \|", text, re.M))
    expected = {
        rule: f"{promised_us(case, rule):.4g} µs | {gained_us(case):.4g} µs"
        for case, rule in ADVICE_TAKEN.items()
    }
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
    record = read_record(RESULTS / "profiling-article.json")
    rows = {row["name"]: row for row in record.rows_of(record.latest_run().run_id)}
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
    record = read_record(RESULTS / "archaeology.json")
    rows = {row["name"]: row for row in record.rows_of(record.latest_run().run_id)}
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
        record = read_record(RESULTS / f"{name}.json")
        rows = record.rows_of(record.latest_run().run_id)
        surprises = [
            r for row in rows for one in row["explained"] for r in one["rows"] if r["surprise"]
        ]
        known = [r for r in surprises if r["cause"] != UNEXPLAINED]
        assert len(known) >= 0.7 * len(surprises), name
