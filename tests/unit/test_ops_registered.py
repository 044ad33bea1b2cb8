"""Every operator of flashdig is one that torch.library.opcheck sees; those of the cache, here."""

import pytest
import torch

from flashdig import attention_with_kvcache
from flashdig.ops import attention, kvcache
from tests.unit import test_ops

# operator -> where opcheck sees it
SEEN = {
    "flashdig::attention_forward": test_ops.test_the_forward_passes_opcheck,
    "flashdig::attention_backward": test_ops.test_the_backward_passes_opcheck,
    "flashdig::cache_attention": "here",
    "flashdig::cache_append_attention_": "here",
    "flashdig::fp8_attention": "on sm_90 alone: tests/gpu/test_hopper_fp8.py",
}


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the calls of flashdig's operators, their tensors as they were before."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flashdig":
            before = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            self.calls.append((func, tuple(before)))
        return func(*args, **(kwargs or {}))


def test_no_operator_is_forgotten() -> None:
    names = [name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()]
    assert {name for name in names if name.startswith("flashdig::")} == set(SEEN)
    assert attention.LAUNCHERS
    assert kvcache.NAMES


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_attention_over_a_cache_passes_opcheck(append, paged) -> None:
    torch.manual_seed(0)
    k_cache, v_cache = (torch.randn(2, 12, 2, 8) for _ in range(2))
    options = {"cache_seqlens": torch.tensor([3, 7], dtype=torch.int32)}
    if paged:
        k_cache, v_cache = (x.reshape(8, 3, 2, 8) for x in (k_cache, v_cache))
        options["page_table"] = torch.tensor([[5, 0, 3, 1], [2, 7, 4, 6]], dtype=torch.int32)
    if append:
        options |= {"k": torch.randn(2, 2, 2, 8), "v": torch.randn(2, 2, 2, 8)}
    q = torch.randn(2, 2, 4, 8)
    with Recorder() as recorder:
        attention_with_kvcache(q, k_cache, v_cache, causal=True, backend="tiled", **options)
    ((operator, arguments),) = recorder.calls
    name = "cache_append_attention_" if append else "cache_attention"
    assert operator.name().removeprefix("flashdig::").split(".")[0] == name
    checks = ("test_schema", "test_autograd_registration", "test_faketensor",
              "test_aot_dispatch_static")  # fmt: skip
    torch.library.opcheck(operator, arguments, test_utils=checks)
