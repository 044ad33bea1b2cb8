"""Kernel names against decodings written by hand, and against any string at all."""

import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdig.readers.kernel_names import KernelName, decode
from flashdig.readers.kernel_names.mangled import readable
from flashdig.readers.kernel_names.symbol import template_arguments

DATA = Path(__file__).parent.parent / "data" / "kernel_names"
RECORDED: list[str] = json.loads(lzma.decompress((DATA / "h200_recordings.json.xz").read_bytes()))
PUBLIC: list[str] = [e["name"] for e in json.loads((DATA / "public.json").read_text())["names"]]
ALL = RECORDED + PUBLIC
# ranges that the profiler draws on the device's lane; they are in the list because torch's table
# has them, and they are no kernels
ANNOTATIONS = ("## Call CompiledFxGraph", "attn_fwd", "step")


def find(beginning: str) -> KernelName:
    """The decoding of the one name (or the first of several alike) that begins so."""
    names = [name for name in ALL if name.startswith(beginning)]
    assert names, beginning
    return decode(names[0])


# beginning of the name -> family, role, dtype, tile, arch, tensor cores, pipeline
MATMUL = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": (
        *("cublas", "matmul", "bfloat16", (256, 128, 64)),
        *("sm90", True, "4 stages, cluster 1x2, cooperative"),
    ),
    "nvjet_hsh_256x128_64x4_1x2": (
        *("cublas", "matmul", "float16", (256, 128, 64)),
        *(None, True, "4 stages, cluster 1x2, cooperative"),
    ),
    "nvjet_qqtst_128x256_128x6_2x1_2cta": (
        *("cublas", "matmul", "float8_e4m3fn", (128, 256, 128)),
        *(None, True, "6 stages, cluster 2x1"),
    ),
    "nvjet_tst_64x24_64x16_4x1_v_bz_splitK": (
        *("cublas", "matmul", "bfloat16", (64, 24, 64)),
        *(None, True, "16 stages, cluster 4x1, split-k"),
    ),
    "nvjet_sm120_tst_mma_": ("cublas", "matmul", "bfloat16", None, "sm120", True, None),
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3": (
        *("cublas", "matmul", "float32", (128, 128, 8), "sm80", False, "3 stages"),
    ),
    "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x32_stage3": (
        *("cublas", "matmul", "float16", (64, 64, 32), "sm80", True, "3 stages"),
    ),
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n": (
        *("cublas", "matmul", "tf32", (128, 128, 32), "sm90", True, None),
    ),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": (
        *("cublas", "matmul", "bfloat16", (128, 128, 64), "sm90", True, None),
    ),
    "ampere_bf16_s16816gemm_bf16_256x128": (
        *("cublas", "matmul", "bfloat16", (256, 128, 32), "sm80", True),
        "instruction s16816, 3 stages",
    ),
    "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2": (
        *("cublas", "matmul", "float16", (64, 64, 64), "sm80", True),
        "instruction s16816, 6 stages",
    ),
    "volta_fp16_s884gemm_fp16_256x128": (
        *("cublas", "matmul", "float16", (256, 128), "sm70", True, "instruction s884"),
    ),
    "volta_sgemm_128x64_tn": ("cublas", "matmul", "float32", (128, 64), "sm70", False, None),
    "ampere_sgemm_128x128_tn": ("cublas", "matmul", "float32", (128, 128), "sm80", False, None),
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn": (
        *("cutlass", "matmul", "float32", (128, 32, 8), "sm80", False, "5 stages"),
    ),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128": (
        *("cutlass", "matmul", "bfloat16", (256, 128, 32), "sm80", True, "3 stages"),
    ),
    "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16": (
        *("cutlass", "matmul", "bfloat16", (128, 128, 64), "sm90", True, "pingpong"),
    ),
    "std::enable_if<!T7, void>::type internal::gemvx::kernel": (
        *("cublas", "matmul", "bfloat16", None, None, False, None),
    ),
    "_ZN8internal5gemvx6kernelI": ("cublas", "matmul", "float16", None, None, False, None),
    "void gemvNSP_kernel<float": ("cublas", "matmul", "float32", None, None, False, None),
    "void cublasLt::splitKreduce_kernel": (
        *("cublas", "reduction", "float32", None, None, False, None),
    ),
    "void deep_gemm::fp8_gemm_kernel": (
        *("deep_gemm", "matmul", "float8_e4m3fn", None, None, True, None),
    ),
    "triton_tem_fused__to_copy_addmm_gelu": ("inductor", "matmul", None, None, None, None, None),
    "triton_tem_fused_bmm_7": ("inductor", "matmul", None, None, None, None, None),
    "Cijk_Ailk_Bljk_HHS_BH_MT128x128x16": (
        *("tensile", "matmul", "float16", (128, 128, 16), None, True, None),
    ),
}

# part of a recorded name -> role, pass, dtype
ATEN = {
    "softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 11": (
        "softmax",
        "forward",
        "bfloat16",
    ),
    "softmax_warp_forward<float, float, float, 11": ("softmax", "forward", "float32"),
    "softmax_warp_backward<c10::BFloat16": ("softmax", "backward", "bfloat16"),
    "cunn_SoftMaxBackwardSmem<4, float": ("softmax", "backward", "float32"),
    "vectorized_layer_norm_kernel<c10::BFloat16": ("norm", None, "bfloat16"),
    "layer_norm_grad_input_kernel_vectorized": ("norm", "backward", "bfloat16"),
    "GammaBetaBackwardCUDAKernelTemplate": ("norm", "backward", "bfloat16"),
    "masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}::operator()() const"
    "::{lambda()#12}": ("elementwise", None, "bfloat16"),
    "CatArrayBatchedCopy<": ("copy", None, None),
    "vectorized_gather_kernel": ("copy", None, None),
    "indexSelectSmallIndex<c10::BFloat16": ("copy", None, "bfloat16"),
    "triu_tril_kernel<bool": ("elementwise", None, "bool"),
    "fused_dropout_kernel_vec<c10::BFloat16": ("elementwise", "forward", "bfloat16"),
    "masked_scale_kernel<bool, c10::BFloat16": ("elementwise", "backward", "bfloat16"),
    "isneginf_kernel_impl": ("elementwise", None, "float32"),
    "embedding_backward_feature_kernel<c10::BFloat16": ("reduction", "backward", "bfloat16"),
    "ReduceOp<c10::BFloat16, at::native::func_wrapper_t": ("reduction", None, "bfloat16"),
    "ReduceOp<float, at::native::ArgMaxOps<float>": ("reduction", None, "float32"),
    "MeanOps<float": ("reduction", None, "float32"),
    "bfloat16_copy_kernel_cuda": ("copy", None, "float32"),
    "FillFunctor<c10::BFloat16>": ("elementwise", None, "bfloat16"),
    "AUnaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::binary_internal::Mul": (
        "elementwise",
        None,
        "bfloat16",
    ),
    "silu_backward_kernel": ("elementwise", "backward", "bfloat16"),
    "arange_cuda_out": ("elementwise", None, "int64"),
    "DeviceScanKernel": ("reduction", None, None),
    "15CUDAFunctor_addIfE": ("elementwise", None, "float32"),
    "18GeluCUDAKernelImpl": ("elementwise", None, "float16"),
    "LogSoftMaxForwardEpilogue": ("softmax", "forward", "float32"),
}


@pytest.mark.parametrize("beginning", MATMUL)
def test_matrix_product_names(beginning: str) -> None:
    k = find(beginning)
    found = (k.family, k.role, k.dtype, k.tile, k.arch, k.tensor_cores, k.pipeline)
    assert found == MATMUL[beginning]


@pytest.mark.parametrize("part", ATEN)
def test_aten_names(part: str) -> None:
    names = [name for name in ALL if part in name]
    assert names
    for name in names:
        k = decode(name)
        assert (k.role, k.pass_, k.dtype) == ATEN[part], name
        assert k.family in ("aten", "cub")
        assert k.tensor_cores is False


def test_every_recorded_kernel_belongs_to_a_family() -> None:
    unknown = [n for n in ALL if decode(n).family == "unknown"]
    assert [n for n in unknown if not n.startswith(ANNOTATIONS)] == []
    assert all(decode(n).role not in ("unknown", "other") for n in ALL if n not in unknown)


def test_words_are_one_sentence_and_name_the_facts() -> None:
    k = find("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8")
    assert k.words == (
        "Matrix product of cuBLAS (xmma), fp32, tile 128x128x8, 3 stages, "
        "on CUDA cores (no tensor cores), built for sm_80."
    )
    assert all(decode(n).words.endswith(".") and ".." not in decode(n).words for n in ALL)
    assert all(", ," not in decode(n).words for n in ALL)


@pytest.mark.parametrize(
    ("name", "role", "backend"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1, "nccl"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 1, "nccl"),
        ("ncclDevKernel_SendRecv", 1, "nccl"),
        ("rcclGenericKernel", 1, "rccl"),
        ("my_nccl_like_gemm", 0, None),
        ("hip_something", 0, None),
        ("void dma_kernel<float>(float*)", 0, None),
        ("gemm", 0, None),
    ],
)
def test_what_is_communication(name: str, role: int, backend: str | None) -> None:
    assert (decode(name).role == "communication") == bool(role)
    assert decode(name).backend == backend


def test_unknown_names_are_unknown_and_guesses_say_so() -> None:
    assert decode("my_nccl_like_gemm") == KernelName(
        name="my_nccl_like_gemm",
        family="unknown",
        role="matmul",
        words="No known family of kernels; the word 'gemm' suggests a matrix product.",
    )
    assert decode("some_kernel").role == "unknown"
    assert decode("").family == "unknown"
    assert decode("my_attn_bwd_dq").role == "attention_backward"
    assert decode("SuperFlashAttnFwd").role == "attention_forward"
    # an operator's or annotation's name, not a kernel's
    assert decode("attention").role == "unknown"


def test_readable() -> None:
    assert readable("_ZN5aiter19fmha_fwd_hd128_bf16E") == "aiter::fmha_fwd_hd128_bf16"
    assert readable("not_mangled") == "not_mangled"
    assert readable("_ZN8internal5gemvx6kernelIii6__halfS2_fLb0ELin7E") == (
        "internal::gemvx::kernel<int, int, __half, __half, float, false, -7>"
    )


def test_template_arguments_split_at_their_own_level() -> None:
    assert template_arguments("f<a, g<b, c>, (d)1>(e<x>)") == ("a", "g<b, c>", "(d)1")
    assert template_arguments("f(a<b>)") == ()
    assert template_arguments("f<a, g<b") == ("a", "g<b")


PIECES = st.sampled_from(
    [*ALL, "_ZN", "I", "E", "Li64E", "<", ">", "(", ")", ",", "flash_fwd_kernel", "nvjet_", "_"]
)


@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(PIECES, max_size=5).map("".join),
        st.tuples(st.sampled_from(ALL), st.integers(0, 400), st.text(max_size=4)).map(
            lambda t: t[0][: t[1]] + t[2] + t[0][t[1] + 1 :]
        ),
        st.text(alphabet="_ZNILSEKPRTDUlbifv0123456789", max_size=60).map("_Z".__add__),
    )
)
@settings(max_examples=400, deadline=None)
def test_any_string_decodes(name: str) -> None:
    k = decode(name)
    assert k.name == name
    assert k.words.endswith(".")
    assert k.tile is None or len(k.tile) in (2, 3)


def test_what_a_name_does_not_say_stays_unknown() -> None:
    k = decode("nvjet_sm90_xyz_128x128_64x4_2x1_v_bz_TNN")
    assert (k.role, k.dtype, k.tensor_cores) == ("matmul", None, None)
    assert find("cudnn_generated_fort_native_sdpa_sm90_flash_fprop").dtype is None


def test_very_long_and_deep_names_decode_quickly() -> None:
    assert decode("void f<" * 100_000).name.startswith("void f<")
    assert decode("_Z" + "N1aI" * 50_000).family == "unknown"
    assert decode("_ZP" + "P" * 50_000).family == "unknown"
    assert decode("x" * 2_000_000).family == "unknown"
