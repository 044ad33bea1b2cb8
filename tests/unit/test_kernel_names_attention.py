"""Names of attention kernels against decodings written by hand."""

import json
import lzma
from pathlib import Path

import pytest

from flashdig.readers.kernel_names import KernelName, decode

DATA = Path(__file__).parent.parent / "data" / "kernel_names"
ALL: list[str] = json.loads(lzma.decompress((DATA / "h200_recordings.json.xz").read_bytes())) + [
    entry["name"] for entry in json.loads((DATA / "public.json").read_text())["names"]
]


def find(beginning: str) -> KernelName:
    """The decoding of the one name (or the first of several alike) that begins so."""
    names = [name for name in ALL if name.startswith(beginning)]
    assert names, beginning
    return decode(names[0])


# beginning of the name -> family, backend, role, pass, dtype, tile, head_dim, arch, tensor cores,
# pipeline, causal
ATTENTION = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_": (
        *("cudnn", "cudnn", "attention_forward", "forward", None),
        *((64, 128, 64), 64, "sm90", True, "knob 7", None),
    ),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_": (
        *("cudnn", "cudnn", "attention_backward", "backward", None),
        *((64, 64, 64), 64, "sm90", True, "knob 26", None),
    ),
    "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_6_": (
        *("cudnn", "cudnn", "attention_forward", "forward", None),
        *((128, 64, 64), 64, "sm80", True, "knob 6", None),
    ),
    "cudnn_generated_fort_native_sdpa_sm120_": (
        *("cudnn", "cudnn", "attention_forward", "forward", None),
        *((64, 64, 128), 128, "sm120", True, "knob 3", None),
    ),
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>": (
        *("cudnn", "cudnn", "attention_part", "backward", None),
        *(None, 64, None, None, None, None),
    ),
    "void cudnn::fusion::convert_dq_to_16bits": (
        *("cudnn", "cudnn", "attention_part", "backward", None),
        *(None, None, None, None, None, None),
    ),
    "void cudnn::fusion::fmha_reduce_head": (
        *("cudnn", "cudnn", "attention_part", "backward", None),
        *(None, None, None, None, None, None),
    ),
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorch": (
        *("fmha_cutlass", "efficient", "attention_forward", "forward", "bfloat16"),
        *((64, 64), 64, "sm80", True, "rf", None),
    ),
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorch": (
        *("fmha_cutlass", "efficient", "attention_forward", "forward", "float32"),
        *((64, 64), 64, "sm80", True, "rf", None),
    ),
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": (
        *("fmha_cutlass", "efficient", "attention_forward", "forward", "bfloat16"),
        *((64, 128), 128, "sm80", True, "rf", None),
    ),
    "fmha_cutlassF_bf16_aligned_32x128_gmem_sm80": (
        *("fmha_cutlass", "efficient", "attention_forward", "forward", "bfloat16"),
        *((32, 128), None, "sm80", True, "gmem", None),
    ),
    "fmha_cutlassB_bf16_aligned_64x64_k64_seqaligned_sm80": (
        *("fmha_cutlass", "efficient", "attention_backward", "backward", "bfloat16"),
        *((64, 64), 64, "sm80", True, "seqaligned", None),
    ),
    "fmha_cutlassB_f16_aligned_64x64_k64_dropout_sm75": (
        *("fmha_cutlass", "efficient", "attention_backward", "backward", "float16"),
        *((64, 64), 64, "sm75", True, "dropout", None),
    ),
    "fmha_cutlassB_f16_aligned_k32_sm50": (
        *("fmha_cutlass", "efficient", "attention_backward", "backward", "float16"),
        *(None, 32, "sm50", False, None, None),
    ),
    "void pytorch_flash::flash_fwd_kernel<": (
        *("flash_attention_2", "flash", "attention_forward", "forward", "bfloat16"),
        *((128, 128), 64, None, True, "4 warps", True),
    ),
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<": (
        *("flash_attention_2", "flash", "attention_backward", "backward", "bfloat16"),
        *((128, 128), 64, None, True, "8 warps", True),
    ),
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<": (
        *("flash_attention_2", "flash", "attention_part", "backward", "bfloat16"),
        *((128, 128), 64, None, None, "8 warps", None),
    ),
    "void pytorch_flash::flash_bwd_convert_dq_kernel<": (
        *("flash_attention_2", "flash", "attention_part", "backward", "bfloat16"),
        *((128, 128), 64, None, None, "8 warps", None),
    ),
    "void flash::flash_fwd_kernel<": (
        *("flash_attention_2", "flash_attention_2", "attention_forward", "forward", "bfloat16"),
        *((128, 64), 128, None, True, "4 warps", True),
    ),
    "void flash_fwd_splitkv_kernel<": (
        *("flash_attention_2", "flash_attention_2", "attention_forward", "forward", "float16"),
        *((64, 128), 128, None, True, "4 warps", False),
    ),
    "void flash::flash_fwd_splitkv_combine_kernel<": (
        *("flash_attention_2", "flash_attention_2", "attention_part", "forward", "bfloat16"),
        *((64, 64), 256, None, None, "4 warps", None),
    ),
    "_Z16flash_fwd_kernelI23Flash_fwd_kernel_traits": (
        *("flash_attention_2", "flash_attention_2", "attention_forward", "forward", "bfloat16"),
        *((64, 64), 128, None, True, "4 warps", True),
    ),
    "_ZN5flash24flash_fwd_splitkv_kernelI": (
        *("flash_attention_2", "flash_attention_2", "attention_forward", "forward", "float16"),
        *((64, 256), 64, None, True, "4 warps", None),
    ),
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90": (
        *("flash_attention_3", "flash_attention_3", "attention_forward", "forward", "bfloat16"),
        *((192, 128), 64, "sm90", True, "2 stages, DynamicPersistentTileScheduler", True),
    ),
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90": (
        *("flash_attention_3", "flash_attention_3", "attention_forward", "forward", "bfloat16"),
        *((64, 64), 64, "sm90", True, "2 stages, VarlenDynamicPersistentTileScheduler", False),
    ),
    "void cutlass::device_kernel<flash::FlashAttnFwdCombine": (
        *("flash_attention_3", "flash_attention_3", "attention_part", "forward", "bfloat16"),
        *(None, None, "sm90", None, None, None),
    ),
    "flash::prepare_varlen_num_blocks_kernel": (
        *("flash_attention_3", "flash_attention_3", "attention_part", "forward", None),
        *(None, None, None, None, None, None),
    ),
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90": (
        *("flash_attention_4", "flash_attention_4", "attention_forward", "forward", None),
        *(None, None, "sm90", True, None, None),
    ),
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90": (
        *("flash_attention_4", "flash_attention_4", "attention_backward", "backward", None),
        *(None, None, "sm90", True, None, None),
    ),
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocess": (
        *("flash_attention_4", "flash_attention_4", "attention_part", "backward", "bfloat16"),
        *(None, None, None, None, None, None),
    ),
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100": (
        *("flash_attention_4", "flash_attention_4", "attention_forward", "forward", "bfloat16"),
        *(None, None, "sm100", True, None, None),
    ),
    "triton_tem_fused_flex_attention_0": (
        *("flex_attention", "flex_attention", "attention_forward", "forward", None),
        *(None, None, None, None, None, None),
    ),
    "triton_tem_fused_flex_attention_backward_1": (
        *("flex_attention", "flex_attention", "attention_backward", "backward", None),
        *(None, None, None, None, None, None),
    ),
    "triton_per_fused_flex_attention_backward_0": (
        *("flex_attention", "flex_attention", "attention_part", "backward", None),
        *(None, None, None, None, None, None),
    ),
    "_fwd_kernel_splitK_0d1d2d": (
        *("xformers", "xformers", "attention_forward", "forward", None),
        *(None, None, None, None, None, None),
    ),
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<": (
        *("flashinfer", "flashinfer", "attention_forward", "forward", "bfloat16"),
        *(None, None, None, True, None, True),
    ),
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<": (
        *("flashinfer", "flashinfer", "attention_forward", "forward", None),
        *(None, None, None, False, None, None),
    ),
    "void vllm::paged_attention_v1_kernel": (
        *("vllm", "vllm", "attention_forward", "forward", None),
        *(None, None, None, False, None, None),
    ),
    "kernel_unified_attention_3d": (
        *("vllm", "vllm", "attention_forward", "forward", None),
        *(None, None, None, None, None, None),
    ),
    "void vllm::merge_attn_states_kernel": (
        *("vllm", "vllm", "attention_part", "forward", "bfloat16"),
        *(None, None, None, None, None, None),
    ),
    "fmhaSm100Kernel_QkvBfloat16OBfloat16H64": (
        *("trtllm", "trtllm", "attention_forward", "forward", "bfloat16"),
        *((8, 128), 64, "sm100", True, None, None),
    ),
    "fmha_v2_flash_attention_fp16_64_32_S_qkv_128_causal_sm86": (
        *("trtllm", "trtllm", "attention_forward", "forward", "float16"),
        *((64, 32), 128, "sm86", True, None, True),
    ),
    "_ZN7ck_tile6kentryILi256ELi2ENS_13FmhaFwdKernel": (
        *("ck_tile", "ck", "attention_forward", "forward", None),
        *(None, None, None, None, None, None),
    ),
    "_ZN7ck_tile6kentryILi1ENS_19FmhaBwdDQDKDVKernel": (
        *("ck_tile", "ck", "attention_backward", "backward", None),
        *(None, None, None, None, None, None),
    ),
    "_ZN7ck_tile6kentryILi2ENS_22FmhaBwdOGradDotOKernel": (
        *("ck_tile", "ck", "attention_part", "backward", None),
        *(None, None, None, None, None, None),
    ),
    "aiter::fmha_fwd_hd128_bf16_causal": (
        *("aiter", "aiter", "attention_forward", "forward", "bfloat16"),
        *(None, 128, None, True, None, True),
    ),
}


@pytest.mark.parametrize("beginning", ATTENTION)
def test_attention_names(beginning: str) -> None:
    k = find(beginning)
    found = (k.family, k.backend, k.role, k.pass_, k.dtype, k.tile, k.head_dim, k.arch)
    assert (*found, k.tensor_cores, k.pipeline, k.causal) == ATTENTION[beginning]
    assert k.is_attention


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "flash_fwd_v2_fp16_d64_m64n64_causal",
            ("attention_forward", "forward", "float16", (64, 64), 64, None, None, "v2", True),
        ),
        (
            "flash_fwd_v3_sm90_bf16_d128_m128n128_full",
            (
                *("attention_forward", "forward", "bfloat16", (128, 128), 128),
                *("sm90", True, "v3", False),
            ),
        ),
        (
            "online_softmax_fp32_n1024_causal",
            ("attention_part", "forward", "float32", None, None, None, False, None, True),
        ),
        (
            "flash_fwd_v1_tf32_d64_m32n32_full",
            ("attention_forward", "forward", "tf32", (32, 32), 64, None, True, "v1", False),
        ),
        (
            "flash_fwd_split_k_bf16_d128_m64n64_causal",
            (
                *("attention_forward", "forward", "bfloat16", (64, 64), 128),
                *(None, True, "split_k", True),
            ),
        ),
        (
            "flash_fwd_v1_fp32",
            ("attention_forward", "forward", "float32", None, None, None, False, "v1", None),
        ),
        (
            "flash_bwd_dkdv_v2_bf16_d64",
            ("attention_backward", "backward", "bfloat16", None, 64, None, True, "v2", None),
        ),
    ],
)
def test_our_own_names(name: str, expected: tuple[object, ...]) -> None:
    k = decode(name)
    assert (k.family, k.backend) == ("flashdig", "flashdig")
    found = (k.role, k.pass_, k.dtype, k.tile, k.head_dim, k.arch, k.tensor_cores)
    assert (*found, k.pipeline, k.causal) == expected


# name -> role, pass, dtype, tile, head_dim, on tensor cores, causal, what the words hold
OUR_KERNELS = {
    "flashdig_forward_bf16_d64_m128n64_causal": (
        *("attention_forward", "forward", "bfloat16", (128, 64), 64, True, True),
        "flashdig: attention forward, bf16, head_dim 64, tile 128x64, causal, on tensor cores.",
    ),
    "flashdig_forward_tf32_d192v128_m64n16": (
        *("attention_forward", "forward", "tf32", (64, 16), 192, True, False),
        "head_dim 192 (v: 128), tile 64x16, not causal, on tensor cores.",
    ),
    "flashdig_backward_dq_fp32_d128_m16n16_causal_varlen_sinks": (
        *("attention_backward", "backward", "float32", (16, 16), 128, False, True),
        "backward, dq, fp32, head_dim 128, tile 16x16, causal, packed, sinks, on CUDA cores",
    ),
    "flashdig_backward_dkdv_fp16_d64_m32n64_window_softcap_alibi_dropout_bias": (
        *("attention_backward", "backward", "float16", (32, 64), 64, True, None),
        "dk and dv, fp16, head_dim 64, tile 32x64, in a window, softcap, ALiBi, dropout, bias,",
    ),
    "flashdig_backward_dk_bf16_d256_m64n128_causal": (
        *("attention_backward", "backward", "bfloat16", (64, 128), 256, True, True),
        "backward, dk, bf16, head_dim 256, tile 64x128, causal,",
    ),
    "flashdig_hopper_forward_bf16_d128_m128n128_full": (
        *("attention_forward", "forward", "bfloat16", (128, 128), 128, True, False),
        "attention forward, bf16, head_dim 128, tile 128x128, not causal,",
    ),
    "flashdig_hopper_forward_fp16_d192v128_m128n128_causal_grouped_sinks": (
        *("attention_forward", "forward", "float16", (128, 128), 192, True, True),
        "head_dim 192 (v: 128), tile 128x128, causal, heads that share keys in one tile, sinks,",
    ),
    "flashdig_backward_bias_bf16_d64_m64n64_bias": (
        *("attention_backward", "backward", "bfloat16", (64, 64), 64, True, False),
        "backward, the bias's gradient, bf16,",
    ),
    "flashdig_forward_fp16_d64_m64n64_boolbias": (
        *("attention_forward", "forward", "float16", (64, 64), 64, True, False),
        "not causal, boolean bias,",
    ),
    "flashdig_hopper_forward_bf16_d128_m192n64_causal_varlen_paged_grouped": (
        *("attention_forward", "forward", "bfloat16", (192, 64), 128, True, True),
        "tile 192x64, causal, packed, keys in pages, heads that share keys in one tile,",
    ),
    "flashdig_hopper_backward_bf16_d128_m64n128_causal_varlen": (
        *("attention_backward", "backward", "bfloat16", (64, 128), 128, True, True),
        "backward, dq, dk and dv, bf16, head_dim 128, tile 64x128, causal, packed,",
    ),
    "flashdig_hopper_backward_dkdv_fp16_d256_m64n64_full_alibi": (
        *("attention_backward", "backward", "float16", (64, 64), 256, True, False),
        "backward, dk and dv, fp16, head_dim 256, tile 64x64, not causal, ALiBi,",
    ),
    "flashdig_hopper_backward_preprocess_bf16_v128": (
        *("attention_part", "backward", "bfloat16", None, None, False, None),
        "delta = rowsum(dO * O), zeros for dQ, bf16, head_dim_v 128.",
    ),
    "flashdig_hopper_backward_postprocess_fp16_d64": (
        *("attention_part", "backward", "float16", None, None, False, None),
        "backward's last step, dQ from float32 sums, fp16, head_dim 64.",
    ),
    "flashdig_backward_delta_bf16_v64": (
        *("attention_part", "backward", "bfloat16", None, None, False, None),
        "delta = rowsum(dO * O), bf16, head_dim_v 64.",
    ),
    "flashdig_decode_bf16_d128_m16n128_causal_paged_split": (
        *("attention_forward", "forward", "bfloat16", (16, 128), 128, True, True),
        "attention over a cache, bf16, head_dim 128, tile 16x128, causal, pages, keys in parts,",
    ),
    "flashdig_decode_ragged_fp32_d576v512_m16n32_window_varlen_fp8cache_sinks": (
        *("attention_forward", "forward", "float32", (16, 32), 576, False, None),
        "sequences of different lengths, fp32, head_dim 576 (v: 512), tile 16x32, in a window,",
    ),
    "flashdig_hopper_decode_fp16_d96_m64n128_window_paged_softcap": (
        *("attention_forward", "forward", "float16", (64, 128), 96, True, None),
        "attention over a cache, fp16, head_dim 96, tile 64x128, in a window, pages, softcap,",
    ),
    "flashdig_combine_fp16_v128": (
        *("attention_part", "forward", "float16", None, None, False, None),
        "joins attention over parts of the keys, fp16, head_dim_v 128.",
    ),
    "flashdig_append_kv": (
        *("attention_part", "forward", None, None, None, False, None),
        "appends keys or values to a cache, or rotates queries.",
    ),
    "flashdig_list_tiles": (
        *("attention_part", "forward", None, None, None, False, None),
        "lists tiles of queries of long sequences over a cache.",
    ),
    "flashdig_clear_slack": (
        *("attention_part", "forward", None, None, None, False, None),
        "clears rows of packed results that belong to no sequence.",
    ),
    "flashdig_fp8_values_by_column": (
        *("attention_part", "forward", None, None, None, False, None),
        "turns V for attention in fp8.",
    ),
    "flashdig_plan_pieces": (
        *("attention_part", "forward", None, None, None, False, None),
        "cuts the keys of sequences of different lengths into pieces.",
    ),
}


@pytest.mark.parametrize("name", OUR_KERNELS)
def test_names_of_the_kernels_that_users_run(name: str) -> None:
    k = decode(name)
    *expected, words = OUR_KERNELS[name]
    assert (k.family, k.backend) == ("flashdig", "flashdig")
    assert [k.role, k.pass_, k.dtype, k.tile, k.head_dim, k.tensor_cores, k.causal] == expected
    assert words in k.words


@pytest.mark.parametrize(
    "name",
    [
        "flashdig_forward",
        "flashdig_forward_int8_d64_m64n64",
        "flashdig_forward_bf16_d64_m64n64_rotary",
        "flashdig_sideways_bf16_d64_m64n64",
        "my_flashdig_forward_bf16_d64_m64n64",
        "flashdig_backward_delta_bf16",
    ],
)
def test_what_only_looks_like_our_kernels_is_not(name: str) -> None:
    assert decode(name).family != "flashdig"


def test_a_causal_window_is_compiled_as_a_local_one() -> None:
    name = find("void pytorch_flash::flash_fwd_kernel<").name
    flags = "false, true, false, false, true, true, false, false>("
    assert flags in name
    local = decode(name.replace(flags, "false, false, true, false, true, true, false, false>("))
    assert decode(name).causal is True
    assert local.causal is None
    assert "causal" not in local.words
    full = decode(name.replace(flags, "false, false, false, false, true, true, false, false>("))
    assert full.causal is False


def test_mangled_and_demangled_forms_agree() -> None:
    mangled = find("_Z16flash_fwd_kernelI")
    demangled = decode(
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, false, false, "
        "cutlass::bfloat16_t, Flash_kernel_traits<128, 64, 64, 4, cutlass::bfloat16_t> >, "
        "false, true, false, false, true, true, false, false>(Flash_fwd_params)"
    )
    assert mangled.words == demangled.words


# g++'s own mangling of FlashAttention-3's template, declared with the recorded name's arguments
MANGLED_FLASH_ATTENTION_3 = (
    "_ZN7cutlass13device_kernelIN5flash11enable_sm90INS1_16FlashAttnFwdSm90INS1_25CollectiveMainloop"
    "FwdSm90ILi2EN4cute5tupleIJNS5_1CILi1EEES8_S8_EEENS6_IJNS7_ILi192EEENS7_ILi128EEENS7_ILi64EEEEEE"
    "Li64ENS_10bfloat16_tEfNS_4arch4Sm90EJLb1ELb0ELb0EEEENS1_21CollectiveEpilogueFwdINS6_IJSA_SC_SB_"
    "EEES9_SE_SG_Li384EJLb0EEEENS1_30DynamicPersistentTileSchedulerILi384ELi32EJLb0EEEEEEEEEEvNT_6Par"
    "amsE"
)


def test_references_inside_of_mangled_names_are_followed() -> None:
    mangled = decode(MANGLED_FLASH_ATTENTION_3)
    recorded = find("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90")
    assert mangled.words == recorded.words
    assert mangled.tile == (192, 128)
    assert mangled.causal is True
