"""flash_attn_combine of FlashAttention-3 and -4: results over parts of the keys, merged."""

import pytest
import torch

from flashdig.facades import flash_attn_3 as fa3
from flashdig.facades import flash_attn_4 as fa4
from flashdig.kernels.reference import merge_partials


@pytest.mark.parametrize("module", [fa3, fa4], ids=["3", "4"])
@pytest.mark.parametrize("shape", [(3, 2, 5, 4, 8), (3, 10, 4, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_results_merge(module, shape, dtype) -> None:
    torch.manual_seed(0)
    outs = torch.randn(shape).transpose(-2, -3).contiguous().transpose(-2, -3)
    lses = torch.randn(*shape[:-3], shape[-2], shape[-3]).mT
    lses[1, :1] = -torch.inf
    out, lse = module.flash_attn_combine(outs, lses, out_dtype=dtype)
    expected, expected_lse = merge_partials(outs, lses.mT)
    assert (out.shape, lse.shape, out.dtype) == (shape[1:], shape[1:-1], dtype)
    assert torch.equal(out, expected.to(dtype))
    assert torch.equal(lse, expected_lse.mT)
    weights = torch.softmax(lses, dim=0)[..., None]
    torch.testing.assert_close(expected, (weights * outs).sum(0))
    place = torch.full(shape[1:], torch.nan, dtype=dtype)
    written, _ = module.flash_attn_combine(outs, lses, place)
    assert written is place
    assert torch.equal(place, out)
    assert module.flash_attn_combine(outs.to(dtype), lses)[0].dtype == dtype


def test_combine_of_flash_attention_4() -> None:
    outs, lses = torch.randn(3, 10, 4, 8), torch.randn(3, 10, 4)
    out, lse = fa4.flash_attn_combine(
        outs, lses, cu_seqlens=torch.tensor([0, 4, 10]), return_lse=False
    )
    assert lse is None
    assert torch.equal(out, fa3.flash_attn_combine(outs, lses)[0])
    for name in ("seqused", "virtual_batch_idx"):
        with pytest.raises(NotImplementedError, match=f"^{name}"):
            fa4.flash_attn_combine(outs, lses, **{name: torch.zeros(2).int()})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"out_partial": torch.zeros(10, 4, 8)}, ValueError),
        ({"out_partial": [1]}, TypeError),
        ({"out_partial": torch.zeros(0, 10, 4, 8)}, ValueError),
        ({"lse_partial": torch.zeros(3, 4, 10)}, ValueError),
        ({"lse_partial": torch.zeros(3, 10, 4).int()}, TypeError),
        ({"out_dtype": torch.int8}, ValueError),
        ({"out": torch.zeros(10, 4, 7)}, ValueError),
        ({"out": torch.zeros(10, 4, 8), "out_dtype": torch.float16}, ValueError),
        ({"out": 3}, TypeError),
    ],
)
def test_bad_partial_results_are_named(change, error) -> None:
    good = {"out_partial": torch.zeros(3, 10, 4, 8), "lse_partial": torch.zeros(3, 10, 4)}
    with pytest.raises(error, match=rf"^{next(iter(change))}\b"):
        fa3.flash_attn_combine(**{**good, **change})
