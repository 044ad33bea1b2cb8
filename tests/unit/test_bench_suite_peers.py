"""The peers' view of a cell: what they refuse, the masks that they are given, their layouts."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashdig.bench.cell_gate import GRADIENTS, cell_reference
from flashdig.bench.cell_inputs import make_inputs
from flashdig.bench.cells import Cell
from flashdig.bench.competitors import Ours, ours_for
from flashdig.bench.flex import block_mask, mask_mod, score_mod
from flashdig.bench.peers import _import_problem, dense_mask, peer
from flashdig.kernels.reference import reference_attention

BASE = {
    "batch": 2, "num_heads": 4, "num_heads_kv": 4, "seqlen_q": 40, "seqlen_k": 40, "head_dim": 16,
    "head_dim_v": 16, "dtype": "float32",
}  # fmt: skip
MASKS = {
    "causal, more keys": {"causal": True, "seqlen_k": 61},
    "window": {"causal": True, "window": (7, 0)},
    "window on both sides": {"window": (7, 3)},
    "ALiBi": {"alibi": True, "causal": True},
    "float bias": {"bias": "float"},
    "bool bias": {"bias": "bool", "causal": True},
    "bias, ALiBi and window": {"bias": "float", "alibi": True, "window": (9, 9)},
}


def inputs_of(device: str = "cpu", **changes):
    return make_inputs(Cell(**{**BASE, **changes}), device, 0, backward=True)


def gate(inputs, prepared) -> list[str]:
    """The verdicts on one competitor's forward and backward."""
    reference = cell_reference(inputs)
    out = prepared.to_common(prepared.forward()())
    verdicts = [reference.check({"out": out}).reason]
    for call in (prepared.backward(), prepared.forward_backward()):
        for _ in range(2):  # the graph that a backward keeps serves again and again
            gradients = map(prepared.to_common, call())
            verdicts.append(reference.check(dict(zip(GRADIENTS, gradients, strict=True))).reason)
    return verdicts


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_tensor_says_all_that_torch_has_no_argument_for(name) -> None:
    inputs = inputs_of(**MASKS[name])
    assert peer("sdpa_math").reason_against(inputs.cell, "cpu") is None
    assert set(gate(inputs, peer("sdpa_math").prepare(inputs))) == {"ok"}


@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"causal": "top-left", "seqlen_k": 61}])
@pytest.mark.parametrize("name", ["sdpa_math", "sdpa_flash"])
def test_plain_cells_need_none(name, changes) -> None:
    inputs = inputs_of(**changes)
    assert peer(name).reason_against(inputs.cell, "cpu") is None
    assert set(gate(inputs, peer(name).prepare(inputs))) == {"ok"}


def test_shared_heads_and_dropout() -> None:
    shared = inputs_of(num_heads_kv=2)
    assert set(gate(shared, peer("sdpa_math").prepare(shared))) == {"ok"}
    dropped = inputs_of(dropout_p=0.2)
    assert set(gate(dropped, peer("sdpa_math").prepare(dropped))) == {"ok"}


@pytest.mark.parametrize("name", MASKS)
def test_flex_sees_the_same_masks_and_scores(name) -> None:
    inputs = inputs_of(**MASKS[name], softcap=4.0)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    out = flex_attention(
        q, k, v, score_mod=score_mod(inputs), block_mask=block_mask(inputs)
    ).transpose(1, 2)
    assert cell_reference(inputs).check({"out": out}).reason == "ok"


def test_flex_keeps_packed_sequences_apart() -> None:
    cell = {"lengths": (9, 1, 20), "batch": 3, "seqlen_q": 20, "seqlen_k": 20, "alibi": True}
    inputs = inputs_of(**cell, window=(5, 0))
    mask = create_block_mask(mask_mod(inputs), None, None, 30, 30, device="cpu")
    q, k, v = (x[None].transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    out = flex_attention(q, k, v, score_mod=score_mod(inputs), block_mask=mask)
    assert cell_reference(inputs).check({"out": out[0].transpose(0, 1)}).reason == "ok"
    assert block_mask(inputs).shape == mask.shape


def test_flex_of_a_plain_cell_has_neither() -> None:
    inputs = inputs_of()
    assert score_mod(inputs) is None
    assert block_mask(inputs) is None


@pytest.mark.parametrize(
    ("name", "changes", "device", "says"),
    [
        ("sdpa_cudnn", {}, "cpu", "needs a CUDA device"),
        ("sdpa_cudnn", {}, "cuda", "dtype must be float16 or bfloat16"),
        ("sdpa_flash", {}, "cuda", "dtype must be"),
        ("sdpa_flash", {"dtype": "bfloat16", "alibi": True}, "cuda", "no ALiBi"),
        ("sdpa_flash", {"dtype": "bfloat16", "softcap": 3.0}, "cuda", "no softcap"),
        ("sdpa_flash", {"window": (3, 0)}, "cpu", "need a CUDA device"),
        ("sdpa_flash", {"dropout_p": 0.1}, "cpu", "no dropout on the CPU"),
        (
            "sdpa_flash",
            {"dtype": "float16", "causal": "top-left", "window": (3, 0)},
            "cuda",
            "bottom right",
        ),
        ("sdpa_efficient", {"lengths": (40,)}, "cuda", "no packed input"),
        ("sdpa_efficient", {"sinks": True, "softcap": 1.0}, "cuda", "no softcap, no sinks"),
        (
            "sdpa_efficient",
            {"alibi": True, "seqlen_q": 2**16, "seqlen_k": 2**16},
            "cuda",
            "mask tensor of 64 GiB",
        ),
        ("flex", {}, "cpu", "CUDA"),
        ("flex", {"sinks": True}, "cuda", "no sinks"),
        ("fa3", {}, "cpu", "needs a CUDA device"),
        ("fa3", {}, "cuda", "flash_attn_interface is not installed"),
        ("fa4", {}, "cuda", "flash_attn.cute is not installed"),
    ],
)
def test_what_a_peer_does_not_serve_is_a_reason(name, changes, device, says) -> None:
    reason = peer(name).reason_against(Cell(**{**BASE, **changes}), device)
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize(
    "changes", [{}, {"window": (3, 0)}, {"lengths": (40,)}, {"causal": True, "seqlen_k": 80}]
)
def test_torchs_flash_serves_windows_and_packed_input_on_a_gpu(changes) -> None:
    cell = Cell(**{**BASE, "dtype": "bfloat16", **changes})
    assert peer("sdpa_flash").reason_against(cell, "cuda") is None


@pytest.fixture
def installed(monkeypatch):
    """FlashAttention modules that compute with the oracle and keep what they were called with."""
    _import_problem.cache_clear()
    calls: list[dict] = []

    def install(name: str, returns_tuple: bool) -> list[dict]:
        def flash_attn_func(q, k, v, **options):
            calls.append(options)
            window = options.get("window_size")
            out, lse = reference_attention(
                q,
                k,
                v,
                causal=options["causal"],
                window=window,
                softcap=options.get("softcap", 0.0),
                sinks=options.get("learnable_sink"),
                precision=torch.float32,
            )
            out = out.to(q.dtype)
            return (out, lse) if returns_tuple else out

        for part in {name, name.partition(".")[0]}:
            module = ModuleType(part)
            module.__path__ = []
            module.__spec__ = __import__("importlib").machinery.ModuleSpec(part, None)
            monkeypatch.setitem(sys.modules, part, module)
        sys.modules[name].flash_attn_func = flash_attn_func
        sys.modules[name].flash_attn_varlen_func = flash_attn_func
        return calls

    yield install
    _import_problem.cache_clear()


@pytest.mark.parametrize(
    ("name", "module", "unlimited"),
    [("fa3", "flash_attn_interface", -1), ("fa4", "flash_attn.cute", None)],
)
def test_flash_attention_3_and_4_are_called_in_their_own_words(
    name, module, unlimited, installed
) -> None:
    calls = installed(module, returns_tuple=name == "fa4")
    inputs = inputs_of(dtype="bfloat16", causal=True, softcap=4.0)
    assert peer(name).reason_against(inputs.cell, "cuda") is None
    assert set(gate(inputs, peer(name).prepare(inputs))) == {"ok"}
    assert calls[0] == {"causal": True, "softcap": 4.0}
    windowed = inputs_of(dtype="bfloat16", window=(7, -1))
    assert set(gate(windowed, peer(name).prepare(windowed))) == {"ok"}
    assert calls[-1] == {"causal": False, "window_size": (7, unlimited)}
    with_sinks = inputs_of(dtype="bfloat16", sinks=True)
    reason = peer(name).reason_against(with_sinks.cell, "cuda")
    assert (reason is None) == (name == "fa4")
    if name == "fa4":
        assert set(gate(with_sinks, peer(name).prepare(with_sinks))) == {"ok"}
    assert "ALiBi" in peer(name).reason_against(inputs_of(dtype="float16", alibi=True).cell, "cuda")


def test_packed_input_is_told_where_sequences_begin(installed) -> None:
    seen: dict = {}
    installed("flash_attn.cute", returns_tuple=True)

    def flash_attn_varlen_func(q, k, v, **options):
        seen.update(options)
        return q, None

    sys.modules["flash_attn.cute"].flash_attn_varlen_func = flash_attn_varlen_func
    inputs = inputs_of(lengths=(9, 20), batch=2, seqlen_q=20, seqlen_k=20, dtype="bfloat16")
    peer("fa4").prepare(inputs).forward()()
    assert seen.pop("cu_seqlens_q").tolist() == [0, 9, 29]
    assert seen.pop("cu_seqlens_k").dtype == torch.int32
    assert seen == {"causal": False, "max_seqlen_q": 20, "max_seqlen_k": 20}


def test_a_module_that_cannot_be_imported_is_a_reason(monkeypatch, tmp_path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("raise RuntimeError('built for torch 1.0')")
    monkeypatch.syspath_prepend(str(tmp_path))
    _import_problem.cache_clear()
    reason = peer("fa3").reason_against(Cell(**{**BASE, "dtype": "float16"}), "cuda")
    _import_problem.cache_clear()
    assert reason is not None
    assert "built for torch 1.0" in reason


def test_ours_by_name_and_by_choice() -> None:
    cell = Cell(**BASE)
    assert [one.name for one in ours_for(["auto", "tiled"], cell, "cpu")] == ["fused_cpu", "tiled"]
    assert [one.name for one in ours_for(["tiled", "auto"], Cell(**BASE, softcap=1.0), "cpu")] == [
        "tiled"
    ]
    with pytest.raises(ValueError, match="backend must be auto or one of"):
        ours_for(["untiled"], cell, "cpu")
    assert Ours("tiled").reason_against(cell, "cpu") is None
    assert "softcap" in Ours("fused_cpu").reason_against(Cell(**BASE, softcap=1.0), "cpu")
    everything = inputs_of(softcap=3.0, alibi=True, sinks=True, bias="float", window=(9, 4))
    assert set(gate(everything, Ours("tiled").prepare(everything))) == {"ok"}


def test_a_dense_mask_is_boolean_unless_something_is_added() -> None:
    assert dense_mask(inputs_of(window=(3, 0))).dtype == torch.bool
    added = dense_mask(inputs_of(alibi=True, causal=True))
    assert added.dtype == torch.float32
    assert added.shape == (1, 4, 40, 40)
    assert torch.isneginf(added[0, :, 0, 1:]).all()


def test_forward_of_sdpa_is_the_fused_one_under_test() -> None:
    """The wrapper changes nothing about what torch computes."""
    inputs = inputs_of(causal=True)
    prepared = peer("sdpa_math").prepare(inputs)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(prepared.forward()(), expected)
