"""The fp8 forward of Hopper against float64 attention on the dequantised inputs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashdig import attention, attention_varlen
from flashdig.facades import flash_attn_3
from flashdig.kernels.hopper.fp8_launch import attention_forward
from flashdig.kernels.hopper.fp8_tiles import TILES, Fp8Tile
from flashdig.kernels.reference import reference_attention, reference_attention_varlen
from tests.gpu.backends import gpu_backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or "hopper" not in gpu_backends(), reason="needs sm_90"
    ),
]

E4M3 = torch.float8_e4m3fn


def tensors(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v=None):
    """q, k, v in e4m3 and descale factors that differ from head to head."""
    generator = torch.Generator("cuda").manual_seed(seqlen_q + seqlen_k)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(E4M3)

    q = normal(batch, seqlen_q, heads, head_dim)
    k = normal(batch, seqlen_k, heads_kv, head_dim)
    v = normal(batch, seqlen_k, heads_kv, head_dim_v or head_dim)
    descales = {
        name: 0.5 + torch.rand(batch, heads_kv, generator=generator, device="cuda")
        for name in ("q_descale", "k_descale", "v_descale")
    }
    return q, k, v, descales


def allowance(exact, v, v_descale, seqlen_k) -> float:
    """What rounding P to e4m3 may cost, and what products of 8 bits add.

    P of 3 bits of mantissa is off by at most 2^-4 of itself (and 2^-10 of 2^-SHIFT below its
    normal numbers): |error of out| <= (2^-4 + seqlen_k 2^-14) max|v| if every error had one sign.
    Errors of both signs leave far less: a quarter of that is allowed. Sums of products keep about
    13 bits in Hopper's tensor cores: 2^-10 of the largest |v| for all steps. Then bfloat16.
    """
    largest = float((v.double().abs().amax() * v_descale.amax()).item())
    return (
        0.25 * (2**-4 + min(seqlen_k, 64) * 2**-14) * largest
        + 2**-10 * largest
        + 2**-8 * float(exact.abs().amax())
    )


def assert_is_attention(out, lse, q, k, v, descales, **options) -> None:
    exact, exact_lse = reference_attention(
        q.double(), k.double(), v.double(), **descales, **options
    )
    v_descale = descales.get("v_descale", torch.ones(1, device=v.device))
    allowed = allowance(exact, v, v_descale, k.shape[1])
    error = (out.double() - exact).abs()
    assert float(error.amax()) <= allowed
    # a wrong order of keys would pass no such mean
    assert float(error.square().mean().sqrt()) <= 0.06 * float(exact.square().mean().sqrt()) + 1e-6
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=2e-3, rtol=1e-3)


def run(q, k, v, descales, causal=False, **options):
    return attention(
        q, k, v, causal=causal, **descales, **options, return_lse=True, backend="hopper_fp8"
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [*TILES, (48, 48), (80, 80), (64, 256), (16, 16)])
def test_every_width(head_dims, causal) -> None:
    q, k, v, descales = tensors(2, 300, 333, 4, 2, *head_dims)
    out, lse = run(q, k, v, descales, causal)
    assert out.dtype == torch.bfloat16
    assert_is_attention(out, lse, q, k, v, descales, causal=causal)


@pytest.mark.parametrize("every", [0, 4])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("q_buffers", [1, 2])
def test_other_tiles(every, block_n, q_buffers) -> None:
    q, k, v, descales = tensors(1, 400, 700, 3, 1, 64)
    out, lse = attention_forward(
        *(q, k, v, *[None] * 6, *descales.values()),
        softmax_scale=0.125,
        softcap=0.0,
        window_left=-1,
        window_right=0,
        top_left=False,
        config=Fp8Tile(2, block_n, 3, 240, q_buffers=q_buffers, every=every),
    )
    assert_is_attention(out, lse, q, k, v, descales, causal=True)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (90, 0), (150, 40)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1000, 1000), (130, 900), (700, 300)])
def test_consumers_that_walk_alone(seqlen_q, seqlen_k, window, joint) -> None:
    q, k, v, descales = tensors(2, seqlen_q, seqlen_k, 3, 1, 64)
    for tile in (
        Fp8Tile(3, 128, 4, 160, q_buffers=2, joint=joint),
        Fp8Tile(3, 64, 4, 160, joint=joint),
        Fp8Tile(2, 128, 2, 240, own_walk=False, joint=joint),
    ):
        out, lse = attention_forward(
            *(q, k, v, *[None] * 6, *descales.values()),
            softmax_scale=0.125,
            softcap=0.0,
            window_left=window[0],
            window_right=window[1],
            top_left=False,
            config=tile,
        )
        options = {"window": window} if window != (-1, -1) else {}
        assert_is_attention(out, lse, q, k, v, descales, **options)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (70, 0)},
        {"window": (20, 30)},
        {"causal": "top-left"},
        {"softcap": 5.0, "causal": True},
        {"softmax_scale": 0.5},
        {"softmax_scale": 0.0},
    ],
)
def test_masks_scores_and_out_dtypes(options, out_dtype) -> None:
    q, k, v, descales = tensors(2, 260, 390, 4, 2, 128)
    out, lse = run(q, k, v, descales, **options, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert_is_attention(out, lse, q, k, v, descales, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_and_sinks(causal) -> None:
    q, k, v, descales = tensors(2, 260, 390, 4, 2, 128)
    options = {
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01], device="cuda"),
        "sinks": torch.tensor([1.0, -2.0, 5.0, 0.0], device="cuda"),
    }
    out, lse = run(q, k, v, descales, causal, **options)
    assert_is_attention(out, lse, q, k, v, descales, causal=causal, **options)


def test_without_factors_and_with_a_factor_of_zero() -> None:
    q, k, v, _ = tensors(1, 130, 200, 2, 2, 128)
    out, lse = run(q, k, v, {}, causal=True)
    assert_is_attention(out, lse, q, k, v, {}, causal=True)
    zero = {"q_descale": torch.zeros(1, 2, device="cuda")}
    out, lse = run(q, k, v, zero, causal=True)
    assert_is_attention(out, lse, q, k, v, zero, causal=True)


@pytest.mark.parametrize(("heads", "heads_kv"), [(8, 2), (6, 2), (16, 1)])
def test_few_queries_of_heads_that_share_keys(heads, heads_kv) -> None:
    q, k, v, descales = tensors(2, 5, 300, heads, heads_kv, 128)
    out, lse = run(q, k, v, descales, causal=True)
    assert_is_attention(out, lse, q, k, v, descales, causal=True)


@pytest.mark.parametrize("window", [None, (60, 0)])
def test_packed_sequences_leave_their_neighbours_alone(window) -> None:
    lengths_k = (130, 64, 1, 0, 257, 100)
    cu_q = torch.tensor([0, 70, 70, 71, 271, 400, 464], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, *torch.tensor(lengths_k).cumsum(0)], dtype=torch.int32, device="cuda")
    used_k = torch.tensor([130, 64, 1, 0, 200, 63], dtype=torch.int32, device="cuda")
    q, k, v, _ = tensors(1, 464, sum(lengths_k), 4, 2, 128)
    q, k, v = q[0], k[0], v[0]
    for x in (k, v):  # keys behind the lengths in use
        x[cu_k[4] + 200 : cu_k[5]] = torch.nan
        x[cu_k[5] + 63 :] = torch.nan
    descales = {
        name: 0.5 + torch.rand(6, 2, device="cuda")
        for name in ("q_descale", "k_descale", "v_descale")
    }
    options = {"seqused_k": used_k, "causal": window is None, "window": window}
    out, lse = attention_varlen(
        q, k, v, cu_q, cu_k, **options, **descales, return_lse=True, backend="hopper_fp8"
    )
    exact, exact_lse = reference_attention_varlen(
        q.double(),
        *(x.double().nan_to_num(0.0) for x in (k, v)),
        cu_q.cpu(),
        cu_k.cpu(),
        **{**options, "seqused_k": used_k.cpu()},
        **descales,
    )
    allowed = allowance(exact, v.double().nan_to_num(0.0), descales["v_descale"], 257)
    assert float((out.double() - exact).abs().amax()) <= allowed
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_maxima_that_rise_and_fall_from_tile_to_tile(head_dim, causal) -> None:
    """P beyond e4m3's range would saturate under a maximum that is kept too long."""
    for ends in ((-8.0, 8.0), (8.0, -8.0)):
        q, k, v, _ = tensors(1, 1100, 1100, 2, 2, head_dim)
        q, k = q.float(), k.float()
        q[..., 0] = 4 * head_dim**0.5 / 8
        k[..., 0] = torch.linspace(*ends, 1100, device="cuda")[None, :, None]
        q, k = q.to(E4M3), k.to(E4M3)
        out, lse = run(q, k, v, {}, causal)
        assert_is_attention(out, lse, q, k, v, {}, causal=causal)


def test_one_key_above_thousands_leaves_the_others_their_share() -> None:
    """Their P lie far below a row's largest: they must not all round to 0.

    Hopper's tensor cores lose some: products of 8 bits are added with about 13 bits of the largest.
    """
    q, k, v, _ = tensors(1, 200, 4000, 2, 2, 64)
    q, k = q.float(), k.float()
    q[..., 0] = 4.0
    k[..., 0] = 0.0
    k[:, 3] = 0.0
    k[:, 3, :, 0] = 16.0  # scores 8, the others' mean 0
    v = v.float() + 1.0
    v[:, 3] = -1.0
    q, k, v = (x.to(E4M3) for x in (q, k, v))
    out, lse = run(q, k, v, {})
    exact, exact_lse = reference_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=2e-3, rtol=1e-3)
    assert float((exact - v.double()[:, 3]).mean()) > 1.0  # the others' share
    assert float((out.double() - exact).abs().amax()) < 0.1


def test_the_operators_shapes_are_known_and_auto_takes_it() -> None:
    q, k, v, descales = tensors(1, 70, 90, 4, 2, 64)
    by_name = run(q, k, v, descales)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v, *descales.values())]
        settings = (0.125, 0.0, -1, 0, False, torch.bfloat16)
        found = torch.ops.flashdig.fp8_attention(*fakes[:3], *[None] * 6, *fakes[3:], *settings)
    for fake, real in zip(found, by_name, strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
    by_itself = attention(q, k, v, **descales, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(by_name, by_itself, strict=True))


def test_repeated_runs_give_the_same_bits() -> None:
    q, k, v, descales = tensors(2, 1000, 1000, 8, 2, 128)
    first = run(q, k, v, descales, causal=True)
    for _ in range(50):
        again = run(q, k, v, descales, causal=True)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads_kv", "head_dim"),
    # V is turned one head at a time, by twos and by fours, counted in up to 64 sections
    [(1, 5000, 2, 256), (33, 129, 6, 128), (70, 64, 4, 64), (3, 700, 5, 64), (1, 20, 1, 16)],
)
def test_values_of_another_call_are_not_read(batch, seqlen, heads_kv, head_dim) -> None:
    """Attention begins while V is turned: what its memory held before is another call's V."""
    q, k, v, descales = tensors(batch, seqlen, seqlen, 2 * heads_kv, heads_kv, head_dim)
    other = v.view(torch.uint8).flip(1).view(E4M3)
    expected = [run(q, k, x, descales) for x in (v, other)]
    for found, x in zip(expected, (v, other), strict=True):
        assert_is_attention(*found, q, k, x, descales)
    for n in range(20):
        out, lse = run(q, k, (v, other)[n % 2], descales)
        assert torch.equal(out, expected[n % 2][0])
        assert torch.equal(lse, expected[n % 2][1])


def test_calls_on_two_streams_at_a_time() -> None:
    calls = [tensors(4, 1000, n, 8, 4, 128) for n in (900, 1100)]
    expected = [run(*call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(*call))
        torch.cuda.synchronize()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[0], other[0])


def test_strides_that_tma_does_not_take_and_a_captured_graph() -> None:
    q, k, v, descales = tensors(2, 70, 90, 2, 2, 64)
    expected = run(q, k, v, descales)
    odd = []
    for x in (q, k, v):
        wide = torch.zeros(*x.shape[:-1], 67, device="cuda").to(E4M3)
        odd.append(wide[..., 1:65].copy_(x))
    assert torch.equal(run(*odd, descales)[0], expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = run(q, k, v, descales)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected[0])


def test_a_negative_scale_and_gradients_are_refused() -> None:
    q, k, v, _ = tensors(1, 64, 64, 1, 1, 64)
    with pytest.raises(ValueError, match="softmax_scale must not be negative"):
        run(q, k, v, {}, softmax_scale=-1.0)
    with pytest.raises(ValueError, match="q requires a gradient"):
        attention(q.requires_grad_(), k, v, backend="hopper_fp8")


def test_the_facade_gives_what_the_oracle_gives() -> None:
    q, k, v, descales = tensors(1, 100, 120, 4, 2, 64)
    out, lse = flash_attn_3.flash_attn_func(
        q, k, v, causal=True, **descales, return_attn_probs=True
    )
    assert_is_attention(out, lse, q, k, v, descales, causal=True)
