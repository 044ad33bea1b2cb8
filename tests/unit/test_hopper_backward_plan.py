"""A plan of the Hopper backward launches what its launcher launches, argument by argument.

Tensors have no memory here: what is compared are the launches themselves.
"""

import pytest
import torch

pytest.importorskip("triton")
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import JITFunction

from flashdig.kernels.hopper import backward_operator as hopper
from flashdig.kernels.hopper import backward_tiles

ROLES = ("grad_out", "grad_lse", "q", "k", "v", "bias", "alibi_slopes", "sinks", "dropout_seed",
         "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "out", "lse")  # fmt: skip
# what a kernel calls the operator's tensors
NAMES = {
    "q_desc": "q", "k_desc": "k", "v_desc": "v", "dout_desc": "grad_out", "dout_ptr": "grad_out",
    "dlse_ptr": "grad_lse", "slopes_ptr": "alibi_slopes", "cu_seqlens_q_ptr": "cu_seqlens_q",
    "cu_seqlens_k_ptr": "cu_seqlens_k", "seqused_q_ptr": "seqused_q", "seqused_k_ptr": "seqused_k",
}  # fmt: skip
ALL = (True, True, True, False, False)


@pytest.fixture
def launched(monkeypatch):
    """Every launch: the kernel's name, its grid, and its arguments by name."""
    launches = []

    def run(self, *args, grid, warmup, **options):
        bound = {**dict(zip(self.arg_names, args, strict=False)), **options}
        launches.append((self.fn.__name__, tuple(grid), bound))

    for kind in (JITFunction, GluonJITFunction):
        monkeypatch.setattr(kind, "run", run)
    return launches


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def call(packed=False, head_dim=64, head_dim_v=64, seqlen_q=300, seqlen_k=340, **changes):
    rows_q, rows_k = ((seqlen_q,), (seqlen_k,)) if packed else ((2, seqlen_q), (2, seqlen_k))
    tensors = dict.fromkeys(ROLES)
    tensors |= {
        "q": meta(*rows_q, 4, head_dim),
        "k": meta(*rows_k, 2, head_dim),
        "v": meta(*rows_k, 2, head_dim_v),
        "out": meta(*rows_q, 4, head_dim_v),
        "grad_out": meta(*rows_q, 4, head_dim_v),
        "lse": meta(*rows_q[:-1], 4, seqlen_q, dtype=torch.float32),
    }
    if packed:
        tensors |= {name: meta(3, dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    numbers = {"softmax_scale": 0.125, "softcap": 0.0, "dropout_p": 0.0, "window_left": -1,
               "window_right": -1, "top_left": False, "allow_tf32": False}  # fmt: skip
    for name, value in changes.items():
        (tensors if name in ROLES else numbers)[name] = value
    return tensors, numbers


def memory(x):
    return x.untyped_storage()._cdata


def described(launches, tensors):
    """Launches in which tensors are told by their role, others by what they are."""

    def role(x):
        for name, tensor in tensors.items():
            if tensor is not None and memory(x) == memory(tensor):
                return name
        return x.dtype, x.numel()

    def one(x):
        if isinstance(x, torch.Tensor):
            return role(x)
        if hasattr(x, "block_shape"):
            sizes = tuple(x.shape), tuple(x.strides), tuple(x.block_shape)
            return "descriptor", role(x.base), sizes, x.layout, x.padding
        return type(x), x

    return [(name, grid, {k: one(x) for k, x in bound.items()}) for name, grid, bound in launches]


def both(launched, tensors, numbers, wanted=ALL, **options):
    arguments = list(tensors.values())
    expected = hopper.attention_backward(*arguments, **numbers, wanted=wanted, **options)
    direct = described(launched, tensors)
    launched.clear()
    plan = hopper.plan_backward(*arguments, **numbers, wanted=wanted, **options)
    assert plan is not None
    found = plan(*arguments)
    planned = described(launched, tensors)
    launched.clear()
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    return direct, planned


CASES = {
    "plain": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 100, "window_right": 0},
    "softcap": {"softcap": 20.0, "window_right": 0},
    "alibi": {"alibi_slopes": meta(4, dtype=torch.float32)},
    "gradient of lse": {"grad_lse": meta(2, 4, 300, dtype=torch.float32)},
    "head_dim 96": {"head_dim": 96},
    "192 and 128": {"head_dim": 192, "head_dim_v": 128, "window_right": 0},
    "256": {"head_dim": 256, "head_dim_v": 256},
    "packed": {"packed": True, "window_right": 0},
    "packed, used": {"packed": True, "seqused_k": meta(2, dtype=torch.int32)},
    "sinks": {"sinks": meta(4, dtype=torch.float32)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("few_keys", [False, True])
def test_plan_and_launcher_launch_the_same(
    launched, monkeypatch, name, few_keys, deterministic
) -> None:
    apart_up_to = dict.fromkeys((64, 128, 256), (340, 340)) if few_keys else {}
    monkeypatch.setattr(backward_tiles, "APART", apart_up_to)
    tensors, numbers = call(**CASES[name])
    wanted = (*ALL[:4], tensors["sinks"] is not None)
    direct, planned = both(launched, tensors, numbers, wanted, deterministic=deterministic)
    assert direct == planned
    kernels = [kernel for kernel, _, _ in planned]
    apart = deterministic or (few_keys and not numbers["window_left"] >= 0 and "packed" not in name)
    assert ("flashdig_hopper_backward_dq" in kernels) == apart
    for _, _, bound in planned:
        for argument, role in NAMES.items():
            if argument in bound and tensors[role] is not None:
                value = bound[argument]
                assert role == (value[1] if value[0] == "descriptor" else value), argument


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, True), (False, False, True)]
)
def test_only_wanted_gradients_come_back(launched, wanted) -> None:
    direct, planned = both(launched, *call(), (*wanted, False, False), deterministic=False)
    assert direct == planned


def test_torchs_own_switch_is_asked_when_the_plan_is_made(launched) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        _, planned = both(launched, *call())
    finally:
        torch.use_deterministic_algorithms(False)
    assert "flashdig_hopper_backward_dq" in [kernel for kernel, _, _ in planned]


@pytest.mark.parametrize(
    "changes",
    [
        {"seqlen_q": 340, "seqlen_k": 300, "window_right": 0},
        {"softmax_scale": -1.0},
        {"grad_out": None},
        {"grad_out": meta(2, 300, 4, 128)[..., ::2]},
        {"q": meta(2, 300, 4, 68)[..., :64]},
        {"lse": meta(2, 300, 4, dtype=torch.float32).transpose(1, 2)},
    ],
    ids=["rows that see nothing", "negative scale", "no gradient", "strides", "pitch", "lse"],
)
def test_calls_that_cut_or_copy_have_no_plan(changes) -> None:
    tensors, numbers = call(**changes)
    assert hopper.plan_backward(*tensors.values(), **numbers, wanted=ALL) is None


def test_what_the_portable_backward_serves_has_its_plan(launched) -> None:
    tensors, numbers = call(bias=meta(1, 1, 300, 340), dropout_p=0.0)
    plan = hopper.plan_backward(*tensors.values(), **numbers, wanted=ALL)
    assert type(plan).__module__ == "flashdig.kernels.triton.backward"
