"""The Hopper forward against the oracle: what the portable kernels' suite cannot see in it."""

import itertools

import pytest
import torch

from flashdig import attention, attention_varlen
from flashdig.kernels.hopper.forward import flashdig_hopper_forward
from flashdig.kernels.hopper.forward_launch import attention_forward
from flashdig.kernels.hopper.tiles import TILES
from flashdig.kernels.reference import reference_attention, reference_attention_varlen
from tests.gpu.backends import gpu_backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or "hopper" not in gpu_backends(), reason="needs sm_90"
    ),
]

PLAIN = {
    "softcap": 0.0,
    "dropout_p": 0.0,
    "window_left": -1,
    "window_right": -1,
    "top_left": False,
    "allow_tf32": False,
}


def tensors(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v=None, dtype=None):
    generator = torch.Generator("cuda").manual_seed(seqlen_q + seqlen_k)
    return [
        torch.randn(*shape, generator=generator, device="cuda").to(dtype or torch.bfloat16)
        for shape in (
            (batch, seqlen_q, heads, head_dim),
            (batch, seqlen_k, heads_kv, head_dim),
            (batch, seqlen_k, heads_kv, head_dim_v or head_dim),
        )
    ]


def assert_is_attention(out, lse, q, k, v, **options) -> None:
    exact, exact_lse = reference_attention(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(out.double(), exact, atol=0.02, rtol=0.01)
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [*TILES, (40, 40), (72, 72), (80, 80), (64, 256)])
def test_every_width_is_right_and_keeps_its_registers(head_dims, causal) -> None:
    q, k, v = tensors(2, 300, 333, 4, 2, *head_dims)
    out, lse = attention(q, k, v, causal=causal, return_lse=True, backend="hopper")
    assert_is_attention(out, lse, q, k, v, causal=causal)
    ((kernels, *_),) = flashdig_hopper_forward.device_caches.values()
    compiled = [one for one in kernels.values() if f"d{head_dims[0]}" in one.name]
    assert compiled
    # a few at a tile's beginning and end, none in a walk (tests/compile/test_hopper_forward.py)
    assert all(one.n_spills <= 32 for one in compiled)


TABLE = {
    (widths, causal, tile)
    for widths, by_mask in TILES.items()
    for causal, steps in by_mask.items()
    for _, tile in steps
}


@pytest.mark.parametrize(("head_dims", "causal", "tile"), sorted(TABLE, key=str))
def test_every_tile_of_the_table_is_right(head_dims, causal, tile) -> None:
    q, k, v = tensors(2, 500, 700, 3, 1, *head_dims)
    out, lse = attention_forward(
        *(q, k, v, *[None] * 8),
        **{**PLAIN, "softmax_scale": head_dims[0] ** -0.5, "window_right": 0 if causal else -1},
        config=tile,
    )
    assert_is_attention(out, lse, q, k, v, causal=causal)


@pytest.mark.parametrize(("head_dims", "causal", "tile"), sorted(TABLE, key=str))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_whose_maximum_grows_along_the_walk(head_dims, causal, tile, dtype) -> None:
    """Scores grow by far more than P holds: keys are walked from the last to the first."""
    q, k, v = tensors(2, 700, 900, 3, 1, *head_dims, dtype=dtype)
    q, k = q * 4, k * torch.linspace(8, 0.01, 900, device="cuda")[:, None, None]
    k[:, 300:310] = 0
    q, k = q.to(dtype), k.to(dtype)
    out, lse = attention_forward(
        *(q, k, v, *[None] * 8),
        **{**PLAIN, "softmax_scale": head_dims[0] ** -0.5, "window_right": 0 if causal else -1},
        config=tile,
    )
    exact, exact_lse = reference_attention(q.double(), k.double(), v.double(), causal=causal)
    torch.testing.assert_close(out.double(), exact, atol=0.03, rtol=0.02)
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("head_dims", "causal", "tile"), sorted(TABLE, key=str))
@pytest.mark.parametrize("lengths", [(64, 65), (65, 192), (129, 700), (300, 427), (500, 100)])
def test_tiles_that_some_consumers_do_not_see(head_dims, causal, tile, lengths) -> None:
    """Consumers beyond the sequence, and windows whose keys only some rows of a tile see."""
    q, k, v = tensors(40, *lengths, 4, 2, *head_dims)
    for left, right in ((-1, 0), (100, 0), (0, 0), (3, 200), (-1, -1)):
        if causal != (right >= 0):
            continue
        out, lse = attention_forward(
            *(q, k, v, *[None] * 8),
            **PLAIN
            | {"softmax_scale": head_dims[0] ** -0.5, "window_left": left, "window_right": right},
            config=tile,
        )
        assert_is_attention(out, lse, q, k, v, window=(left, right))


@pytest.mark.parametrize("lengths", [(1, 300), (1, 1), (5, 129), (17, 64), (100, 20)])
@pytest.mark.parametrize(("heads", "heads_kv"), [(8, 2), (6, 2), (7, 1), (64, 1)])
@pytest.mark.parametrize("sinks", [False, True])
def test_heads_that_share_keys_in_one_tile(lengths, heads, heads_kv, sinks) -> None:
    q, k, v = tensors(2, *lengths, heads, heads_kv, 128)
    logits = torch.randn(heads, device="cuda") if sinks else None
    for causal, grouped in itertools.product((False, True), (False, True)):
        out, lse = attention_forward(
            *(q, k, v, None, None, logits, None, None, None, None, None),
            **{**PLAIN, "softmax_scale": 0.1, "window_right": 0 if causal else -1},
            grouped=grouped,
        )
        assert_is_attention(out, lse, q, k, v, causal=causal, softmax_scale=0.1, sinks=logits)


@pytest.mark.parametrize(("heads", "heads_kv"), [(8, 2), (4, 2), (16, 1)])
@pytest.mark.parametrize("sinks", [False, True])
def test_heads_that_share_keys_in_one_tile_of_packed_rows(heads, heads_kv, sinks) -> None:
    cu_q = torch.tensor([3, 4, 5, 5, 70, 75], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 300, 301, 310, 400, 400], dtype=torch.int32, device="cuda")
    used_q = torch.tensor([1, 1, 0, 60, 5], dtype=torch.int32, device="cuda")
    q, k, v = (x[0] for x in tensors(1, 80, 420, heads, heads_kv, 128))
    logits = torch.randn(heads, device="cuda") if sinks else None
    for causal, grouped in itertools.product((False, True), (False, True)):
        out, lse = attention_forward(
            *(q, k, v, None, None, logits, None, cu_q, cu_k, used_q, None),
            **{**PLAIN, "softmax_scale": 0.1, "window_right": 0 if causal else -1},
            grouped=grouped,
        )
        exact, exact_lse = reference_attention_varlen(
            *(x.double() for x in (q, k, v)),
            cu_q.cpu(),
            cu_k.cpu(),
            seqused_q=used_q.cpu(),
            causal=causal,
            softmax_scale=0.1,
            sinks=logits,
        )
        torch.testing.assert_close(out.double(), exact, atol=0.02, rtol=0.01)
        torch.testing.assert_close(lse.double(), exact_lse.double(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-3, 3.0])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_any_scale(scale, softcap) -> None:
    q, k, v = tensors(1, 130, 140, 2, 2, 64)
    options = {"softmax_scale": scale, "softcap": softcap, "causal": True}
    out, lse = attention(q, k, v, **options, return_lse=True, backend="hopper")
    assert_is_attention(out, lse, q, k, v, **options)


def test_strides_that_tma_does_not_take_are_copied() -> None:
    q, k, v = tensors(2, 70, 90, 2, 2, 64)
    odd = []
    for x in (q, k, v):
        wide = torch.full((*x.shape[:-1], 67), torch.nan, dtype=x.dtype, device="cuda")
        odd.append(wide[..., 1:65].copy_(x))
    out, lse = attention(*odd, return_lse=True, backend="hopper")
    expected = attention(q, k, v, return_lse=True, backend="hopper")
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_packed_sequences_leave_their_neighbours_alone() -> None:
    """Tails that end inside a tile, slack rows full of NaN, lengths in use below the segments'."""
    lengths = [(70, 130), (0, 64), (1, 1), (200, 0), (129, 257), (64, 64)]
    cu_q = torch.tensor([5, 75, 75, 76, 276, 405, 469], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([2, 132, 196, 197, 197, 454, 518], dtype=torch.int32, device="cuda")
    used_k = torch.tensor([100, 64, 1, 0, 200, 63], dtype=torch.int32, device="cuda")
    q, _, _ = (x[0] for x in tensors(1, 600, 640, 4, 2, 128))
    _, k, v = (x[0] for x in tensors(1, 600, 640, 4, 2, 128))
    seen = torch.zeros(640, dtype=torch.bool, device="cuda")
    for start, used in zip(cu_k.tolist(), used_k.tolist(), strict=False):
        seen[start : start + used] = True
    inside = torch.zeros(600, dtype=torch.bool, device="cuda")
    inside[5:469] = True
    for x, there in ((q, inside), (k, seen), (v, seen)):
        x[~there] = torch.nan
    given = {"seqused_k": used_k, "causal": "top-left"}
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, **given, return_lse=True, backend="hopper")
    exact, exact_lse = reference_attention_varlen(
        *(x.double().nan_to_num(0.0) for x in (q, k, v)),
        cu_q.cpu(),
        cu_k.cpu(),
        seqused_k=used_k.cpu(),
        causal="top-left",
    )
    assert len(lengths) == len(used_k)
    torch.testing.assert_close(out.double(), exact, atol=0.02, rtol=0.01)
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=1e-3, rtol=1e-4)
    assert (out[~inside] == 0).all()
    assert torch.isneginf(lse[:, ~inside]).all()


def test_repeated_runs_give_the_same_bits() -> None:
    q, k, v = tensors(2, 1000, 1000, 8, 2, 64)
    first = attention(q, k, v, causal=True, return_lse=True, backend="hopper")
    for _ in range(200):
        again = attention(q, k, v, causal=True, return_lse=True, backend="hopper")
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_a_captured_graph_replays() -> None:
    q, k, v = tensors(2, 500, 500, 4, 4, 128)
    attention(q, k, v, causal=True, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, backend="hopper")
    q.copy_(q.flip(1))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, attention(q, k, v, causal=True, backend="hopper"))


def test_auto_takes_it_and_its_gradients_are_right() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(1, 200, 220, 4, 2, 128))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    by_name = attention(q, k, v, causal=True, backend="hopper")
    assert torch.equal(out, by_name)
    found = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact_out, exact_lse = reference_attention(*exact, causal=True)
    expected = torch.autograd.grad(exact_out.sum() + exact_lse.sum(), exact)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), right, atol=0.03, rtol=0.02)
