"""What findings advise runs, and does what it says."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashdig.bench.timing import float32_precision
from flashdig.findings import Advice, find_in_counters
from flashdig.hardware.devices import find_device
from flashdig.readers.ncu import read_ncu
from tests.findings.test_rules_recorded import CASES, findings_of

NCU = Path(__file__).parents[1] / "data" / "ncu" / "archaeology_h200.csv.gz"
# backends and graphs that need a GPU
NEEDS_GPU = ("sdpa_kernel", "CUDAGraph")


def surroundings() -> dict[str, Any]:
    """The names that advice may ask for, small."""
    batch, heads, seqlen, dim = 2, 4, 16, 8
    q, k, v = (torch.randn(batch, heads, seqlen, dim) for _ in range(3))
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*tensors)

    return {
        **{"torch": torch, "F": F, "q": q, "k": k, "v": v, "attend": attend, "step": attend},
        **{"q_rows": rows[0], "k_rows": rows[1], "v_rows": rows[2]},
        **{"qs": [q, q], "ks": [k, k], "vs": [v, v]},
        "mask": torch.randn(1, 1, seqlen, seqlen),
        "visible": torch.ones(batch, 1, 1, seqlen, dtype=torch.bool),
        "hidden": torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1),
    }


def all_advice() -> dict[str, Advice]:
    names = {name for shown, _ in CASES.values() for name in shown}
    found = [finding for name in sorted(names) for finding in findings_of(name)]
    found += find_in_counters(read_ncu(str(NCU)), find_device("h200"))
    return {f.rule: f.advice for f in found if f.advice is not None and f.advice.code}


ADVICE = all_advice()


@pytest.mark.parametrize("rule", sorted(ADVICE))
def test_its_code_runs_with_the_names_that_it_says(rule, monkeypatch) -> None:
    advice = ADVICE[rule]
    known = surroundings()
    given = {name: known[name] for name in advice.given}
    compile(advice.code, rule, "exec")
    if any(word in advice.code for word in NEEDS_GPU):
        return
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    before = torch.get_float32_matmul_precision()
    with float32_precision(torch.backends.cuda.matmul.fp32_precision):
        try:
            exec(advice.code, given)
        finally:
            torch.set_float32_matmul_precision(before)
    if rule == "repeated-heads":
        return
    out = given.get("out")
    if out is not None:
        assert torch.isfinite(out).all()


def test_the_mask_in_place_gives_the_same() -> None:
    known = surroundings()
    exec(ADVICE["hidden-mask-copy"].code, known)
    expected = F.scaled_dot_product_attention(
        known["q"], known["k"], known["v"], attn_mask=~known["hidden"]
    )
    torch.testing.assert_close(known["out"], expected)


def test_the_wasted_share_of_padding() -> None:
    visible = torch.zeros(2, 1, 1, 16, dtype=torch.bool)
    visible[0], visible[1, ..., :8] = True, True
    given = {"visible": visible}
    exec(ADVICE["padding"].code, given)
    assert given["wasted"] == pytest.approx(1 - (256 + 64) / 2 / 256)
