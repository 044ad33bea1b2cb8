"""FlashAttention's names over flashdig: exact signatures, and what each function hands on."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashdig
from flashdig.facades import arguments, flash_attn, flash_attn_3, flash_attn_4

FA2_END = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    flash_attn: {
        "flash_attn_func": f"q, k, v, {FA2_END}",
        "flash_attn_kvpacked_func": f"q, kv, {FA2_END}",
        "flash_attn_qkvpacked_func": f"qkv, {FA2_END}",
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
            f"{FA2_END}, block_table=None"
        ),
        "flash_attn_varlen_kvpacked_func": (
            f"q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {FA2_END}"
        ),
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {FA2_END}",
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
            "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
        ),
    },
    flash_attn_3: {
        "flash_attn_func": (
            "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
            "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
            "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
        ),
        "flash_attn_qkvpacked_func": (
            "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, "
            "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
            "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
            "seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, "
            "k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, "
            "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
            "return_attn_probs=False"
        ),
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
            "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
            "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
            "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
            "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
            "return_softmax_lse=False"
        ),
        "get_scheduler_metadata": (
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
            "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, "
            "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
            "causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, "
            "num_splits=0, pack_gqa=None, sm_margin=0"
        ),
    },
    flash_attn_4: {
        "flash_attn_func": (
            "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
            "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
            "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, "
            "mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
            "block_sparse_tensors_bwd=None, return_lse=False"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
            "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
            "gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
            "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
            "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, "
            "mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, "
            "return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
            "disable_scheduler_metadata=False"
        ),
        "flash_attn_combine": (
            "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
            "virtual_batch_idx=None, return_lse=True"
        ),
    },
}
FUNCTIONS = [
    pytest.param(getattr(module, name), text, id=f"{module.__name__.split('.')[-1]}.{name}")
    for module, functions in SIGNATURES.items()
    for name, text in functions.items()
]
ROOT = Path(flashdig.__file__).parents[2]


def parameters_of(text):
    """[(name, default)] of a signature written as in Python; no default is the class `empty`."""
    arguments_of = ast.parse(f"def f({text}): ...").body[0].args
    values = [
        torch.bfloat16 if ast.unparse(default) == "torch.bfloat16" else ast.literal_eval(default)
        for default in arguments_of.defaults
    ]
    missing = [inspect.Parameter.empty] * (len(arguments_of.args) - len(values))
    return list(zip((a.arg for a in arguments_of.args), missing + values, strict=True))


@pytest.mark.parametrize(("function", "text"), FUNCTIONS)
def test_signatures_are_the_originals(function, text) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert [(p.name, p.default) for p in parameters] == parameters_of(text)
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("module", SIGNATURES)
def test_every_name_is_listed(module) -> None:
    assert sorted(SIGNATURES[module]) == sorted(module.__all__)


@pytest.mark.parametrize(("function", "text"), FUNCTIONS)
def test_the_page_about_migration_has_a_row_for_every_argument(function, text) -> None:
    page = (ROOT / "docs" / "migration-from-flash-attn.md").read_text()
    chapter = {
        "flash_attn": "## FlashAttention-2",
        "flash_attn_3": "## FlashAttention-3",
        "flash_attn_4": "## FlashAttention-4",
    }[function.__module__.split(".")[-1]]
    rows = page.split(chapter)[1].split("\n## ")[0].split("\n| ")[1:]
    named = "".join(row.split("|")[0] for row in rows)
    for name, _ in parameters_of(text):
        assert f"`{name}`" in named, name
    assert f"`{function.__name__}`" in page.split(chapter)[1].split("\n## ")[0]


def test_flash_attention_2_is_at_the_top_level_and_loads_torch_only_when_used() -> None:
    for name in flash_attn.__all__:
        assert getattr(flashdig, name) is getattr(flash_attn, name)
        assert name in flashdig.__all__
    code = (
        "import sys, flashdig; assert 'torch' not in sys.modules\n"
        "flashdig.flash_attn_func; assert 'torch' in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize(
    ("given", "pair"),
    [
        ((3, 5), (3, 5)),
        ([-1, 0], (-1, 0)),
        ((None, 2), (None, 2)),
        (torch.tensor([7, 2]), (7, 2)),
        ((torch.tensor(7), torch.tensor(2, dtype=torch.int32)), (7, 2)),
    ],
)
def test_windows_are_pairs_of_any_integers(given, pair) -> None:
    assert arguments.window_pair(given) == pair
    assert all(type(side) in (int, type(None)) for side in arguments.window_pair(given))


@pytest.mark.parametrize("given", [None, 4, (1,), (1, 2, 3), (1.0, 2), (True, 2), ("a", 1)])
def test_other_windows_are_refused(given) -> None:
    with pytest.raises(TypeError, match="window_size"):
        arguments.window_pair(given)


def test_a_length_in_a_tensor_is_not_read_back() -> None:
    assert arguments.known_length(torch.tensor(5, device="meta")) is None
    assert arguments.known_length(5) == 5
    assert arguments.as_length("max_seqlen_q", torch.tensor(5)) == 5
    with pytest.raises(TypeError, match="max_seqlen_q"):
        arguments.as_length("max_seqlen_q", None)


def test_packed_tensors_are_read_in_place(monkeypatch) -> None:
    """Every packed form hands views of its tensor to attention."""
    seen = []

    def spy(q, k, v, *rest, **options):
        seen.append((q, k, v))

    for module in (flash_attn, flash_attn_3):
        for name in ("attention", "attention_varlen"):
            monkeypatch.setattr(module, name, spy)
    qkv, kv = torch.zeros(2, 5, 3, 4, 8), torch.zeros(2, 5, 2, 4, 8)
    rows, rows_kv, heads = qkv.flatten(0, 1), kv.flatten(0, 1), torch.zeros(2, 5, 8, 8)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    flash_attn.flash_attn_qkvpacked_func(qkv)
    flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], kv)
    flash_attn.flash_attn_varlen_qkvpacked_func(rows, cu, 6)
    flash_attn.flash_attn_varlen_kvpacked_func(rows[:, 0], rows_kv, cu, cu, 6, 6)
    flash_attn_3.flash_attn_qkvpacked_func(qkv)
    flash_attn_3.flash_attn_qkvpacked_func(heads, num_heads_q=4)
    assert len(seen) == 6
    memory = {x.untyped_storage().data_ptr(): x for x in (qkv, kv, heads)}
    for tensors in seen:
        for x in tensors:
            assert x.untyped_storage().data_ptr() in memory
    first = seen[0]
    assert [x.storage_offset() for x in first] == [0, 32, 64]
    assert [x.storage_offset() for x in seen[5]] == [0, 32, 48]
    assert {x.stride() for x in first} == {(5 * 96, 96, 8, 1)}
