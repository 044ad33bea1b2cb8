"""The Hopper backward against the oracle in float64, and twice against itself."""

import math

import pytest
import torch

from flashdig import attention
from flashdig.kernels.hopper import backward_tiles
from flashdig.kernels.hopper.backward_operator import attention_backward
from flashdig.kernels.hopper.backward_tiles import APART
from flashdig.kernels.reference import reference_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]


@pytest.fixture(autouse=True)
def dq_is_added_up_whatever_the_lengths(monkeypatch):
    """Few keys would leave the sums of dQ untested."""
    monkeypatch.setattr(backward_tiles, "APART", {})


# norm of the error over that of the gradient: rounding of inputs, P and dS to the dtype
LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
LENGTHS = [(256, 256), (333, 333), (130, 517), (517, 130), (1, 700), (700, 1), (64, 1000)]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (100, 0)},
    "band": {"window": (70, 20)},
    "left": {"window": (70, -1)},
}


def gradients(q, k, v, options, lse_too=False, deterministic=False, poison=None):
    """(ours, the oracle's) of q, k, v and, if there, the sinks."""
    sinks = options.get("sinks")
    inputs = [q, k, v] + ([] if sinks is None else [sinks])
    exact = [x.double().detach().requires_grad_() for x in inputs]
    named = dict(options, sinks=None if sinks is None else exact[3])
    out, lse = reference_attention(*exact[:3], **named)
    dout = torch.randn(out.shape, device=out.device).to(q.dtype)
    dlse = torch.randn(lse.shape, device=lse.device) if lse_too else None
    finite = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + (finite * dlse).sum()
    expected = torch.autograd.grad(loss, exact)
    if poison is not None:
        poison(q, k, v, dout)
    causal = options.get("causal", False)
    left, right = options.get("window", (-1, -1))
    ours = attention_backward(
        dout,
        dlse,
        q,
        k,
        v,
        None,
        options.get("alibi_slopes"),
        sinks,
        *([None] * 5),
        out.detach().to(q.dtype),
        lse.detach().float(),
        softmax_scale=q.shape[-1] ** -0.5,
        softcap=options.get("softcap", 0.0),
        dropout_p=0.0,
        window_left=left,
        window_right=0 if causal else right,
        top_left=causal == "top-left",
        allow_tf32=False,
        wanted=(True, True, True, False, sinks is not None),
        deterministic=deterministic,
    )
    return [x for x in ours if x is not None], expected


def assert_close(ours, expected, limit):
    for name, x, y in zip(("dq", "dk", "dv", "dsinks"), ours, expected, strict=False):
        if name == "dsinks":
            limit *= 4  # the delta of rounded outputs
        assert torch.isfinite(x).all(), name
        scale = y.norm().item()
        error = (x.double() - y).norm().item()
        assert error <= limit * scale + 1e-4 * math.sqrt(y.numel()), (name, error, scale)


def inputs(seqlen_q, seqlen_k, head_dim, heads=4, heads_kv=2, dtype=torch.bfloat16):
    torch.manual_seed(seqlen_q + 7 * seqlen_k + head_dim)

    def normal(seqlen, n):
        return torch.randn(2, seqlen, n, head_dim, device="cuda").to(dtype)

    return normal(seqlen_q, heads), normal(seqlen_k, heads_kv), normal(seqlen_k, heads_kv)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_and_lengths(head_dim, mask, deterministic):
    for lengths in LENGTHS:
        q, k, v = inputs(*lengths, head_dim)
        found = gradients(q, k, v, MASKS[mask], deterministic=deterministic)
        assert_close(*found, LIMITS[q.dtype])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("feature", ["softcap", "alibi", "sinks", "lse", "fp16", "mha", "mqa"])
def test_features(head_dim, feature, deterministic):
    dtype = torch.float16 if feature == "fp16" else torch.bfloat16
    heads_kv = {"mha": 4, "mqa": 1}.get(feature, 2)
    for lengths in ((333, 333), (130, 517), (517, 130)):
        q, k, v = inputs(*lengths, head_dim, heads_kv=heads_kv, dtype=dtype)
        options = {"causal": True}
        if feature == "softcap":
            options["softcap"] = 5.0
        if feature == "alibi":
            options["alibi_slopes"] = torch.rand(2, 4, device="cuda") * 0.3
        if feature == "sinks":
            options["sinks"] = torch.randn(4, device="cuda")
        lse_too = feature in ("lse", "sinks")
        found = gradients(q, k, v, options, lse_too, deterministic)
        assert_close(*found, LIMITS[dtype])


def test_what_nobody_sees_shows_nowhere():
    """Rows without keys, under a causal mask of fewer keys than rows, hold NaN."""
    q, k, v = inputs(517, 130, 64)

    def poison(q, k, v, dout):
        for x in (q, dout):
            x[:, : 517 - 130] = float("nan")

    ours, expected = gradients(q, k, v, {"causal": True}, poison=poison)
    assert_close(ours, expected, LIMITS[q.dtype])
    assert (ours[0][:, : 517 - 130] == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_runs_are_the_same_bits(head_dim):
    q, k, v = inputs(1000, 1000, head_dim)
    torch.manual_seed(0)
    first = gradients(q, k, v, {"causal": True}, deterministic=True)[0]
    for _ in range(20):
        torch.manual_seed(0)
        again = gradients(q, k, v, {"causal": True}, deterministic=True)[0]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("head_dim", "seqlen"), [(128, 500), (128, 1000), (256, 900)])
def test_chooses_dq_apart_where_keys_are_few(head_dim, seqlen, monkeypatch):
    """Then the default's gradients are the deterministic ones, in every run."""
    monkeypatch.setattr(backward_tiles, "APART", APART)
    q, k, v = inputs(seqlen, seqlen, head_dim)
    options = {"causal": seqlen > 512}
    found = []
    for deterministic in (True, False, False):
        torch.manual_seed(0)
        ours, expected = gradients(q, k, v, options, deterministic=deterministic)
        assert_close(ours, expected, LIMITS[q.dtype])
        found.append(ours)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_only_dq_is_added_up_in_any_order(head_dim, causal):
    """dK and dV are the same bits in every run; dQ differs by no more than rounding."""
    q, k, v = inputs(700, 900, head_dim, heads=8, heads_kv=1)
    torch.manual_seed(0)
    first = gradients(q, k, v, {"causal": causal})[0]
    for _ in range(20):
        torch.manual_seed(0)
        dq, dk, dv = gradients(q, k, v, {"causal": causal})[0]
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])
        assert (dq.float() - first[0].float()).norm() <= 1e-3 * first[0].float().norm()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("mask", "repeats"),
    [("full", 1), ("causal", 1), ("top-left", 1), ("window", 1), ("full", 12), ("causal", 12)],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_input_is_each_sequence_alone(head_dim, mask, repeats, deterministic):
    """Sequences of no rows, of no keys and of rows without keys among them; slack holds NaN.
    Repeated, they are more tiles of keys than an H200 has multiprocessors."""
    lengths = [(300, 300), (1, 200), (0, 70), (129, 0), (517, 130), (64, 700)] * repeats
    torch.manual_seed(3)
    parts = [inputs(q, k, head_dim) for q, k in lengths]
    q, k, v = (torch.cat([part[i][0] for part in parts]) for i in range(3))
    slack = torch.full((9, 1, 1), float("nan"), device="cuda", dtype=q.dtype)
    q, k, v = (torch.cat([x, slack.expand(9, *x.shape[1:])]) for x in (q, k, v))
    starts = torch.tensor([(0, 0), *lengths]).cumsum(0).int().cuda()
    options = MASKS[mask]
    expected = [torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in (q, k, v)]
    out = torch.zeros_like(q)
    lse = torch.full((4, q.shape[0]), float("-inf"), device="cuda")
    dout = torch.randn(q.shape, device="cuda").to(q.dtype)
    for (rows, keys), (row, key) in zip(lengths, starts[:-1].tolist(), strict=True):
        spans = slice(row, row + rows), slice(key, key + keys), slice(key, key + keys)
        if 0 in (rows, keys):
            continue
        alone = [
            x[None, span].double().requires_grad_()
            for x, span in zip((q, k, v), spans, strict=True)
        ]
        o, statistics = reference_attention(*alone, **options)
        for total, span, grad in zip(
            expected, spans, torch.autograd.grad((o * dout[spans[0]]).sum(), alone), strict=True
        ):
            total[span] = grad[0]
        out[spans[0]] = o[0].detach().to(q.dtype)
        lse[:, spans[0]] = statistics[0].float()
    causal = options.get("causal", False)
    left, right = options.get("window", (-1, -1))
    ours = attention_backward(
        dout,
        None,
        q,
        k,
        v,
        *([None] * 4),
        starts[:, 0].contiguous(),
        starts[:, 1].contiguous(),
        None,
        None,
        out,
        lse,
        softmax_scale=head_dim**-0.5,
        softcap=0.0,
        dropout_p=0.0,
        window_left=left,
        window_right=0 if causal else right,
        top_left=causal == "top-left",
        allow_tf32=False,
        wanted=(True, True, True, False, False),
        deterministic=deterministic,
    )
    assert_close(ours[:3], expected, LIMITS[q.dtype])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("seqlen", "heads_kv"), [(500, 64), (500, 32), (130, 64), (1300, 16)])
def test_blocks_that_walk_several_tiles(seqlen, heads_kv, head_dim, mask, deterministic):
    """More tiles of keys than an H200 has multiprocessors, of lengths that end inside a tile, a
    few times: what one tile leaves to the next is timing's to spoil."""
    q, k, v = inputs(seqlen, seqlen, head_dim, heads=min(64, 2 * heads_kv), heads_kv=heads_kv)
    for _ in range(3):
        found = gradients(q, k, v, MASKS[mask], deterministic=deterministic)
        assert_close(*found, LIMITS[q.dtype])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("widths", [(96, 96), (192, 128), (40, 72), (128, 192)])
def test_other_widths_are_padded(widths, deterministic):
    head_dim, head_dim_v = widths
    for lengths in ((333, 333), (130, 517)):
        q, k, _ = inputs(*lengths, head_dim)
        _, _, v = inputs(*lengths, head_dim_v)
        found = gradients(q, k, v, {"causal": True}, deterministic=deterministic)
        assert_close(*found, LIMITS[q.dtype])


def test_strides_and_addresses_that_tma_cannot_take():
    q, k, v = inputs(200, 200, 64)
    wide = torch.zeros(2, 200, 4, 65, device="cuda", dtype=q.dtype)
    wide[..., 1:] = q
    ours, expected = gradients(wide[..., 1:], k, v, {"causal": True})
    assert_close(ours, expected, LIMITS[q.dtype])


@pytest.mark.parametrize("deterministic", [False, True])
def test_by_name(deterministic):
    """Twice: the second call takes the short way."""
    q, k, v = (x.requires_grad_() for x in inputs(333, 333, 128))
    expected, _ = reference_attention(*(x.double() for x in (q, k, v)), causal=True)
    dout = torch.randn_like(q)
    wanted = torch.autograd.grad(expected, (q, k, v), dout.double())
    for _ in range(2):
        out = attention(q, k, v, causal=True, deterministic=deterministic, backend="hopper")
        assert_close(torch.autograd.grad(out, (q, k, v), dout), wanted, LIMITS[q.dtype])
