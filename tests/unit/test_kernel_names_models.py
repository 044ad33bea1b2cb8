"""Kernel names that vision, speech and translation models brought: convolutions, layouts, sorts.

All names are from recordings on an H200 (`tests/data/kernel_names/h200_recordings.json.xz`).
"""

import json
import lzma
import time
from pathlib import Path

import pytest

from flashdig.readers.kernel_names import KernelName, decode

DATA = Path(__file__).parent.parent / "data" / "kernel_names"
RECORDED: list[str] = json.loads(lzma.decompress((DATA / "h200_recordings.json.xz").read_bytes()))


def the_one(part: str) -> KernelName:
    (name,) = [name for name in RECORDED if part in name]
    return decode(name)


# part of the name -> pass, dtype, tile, arch, tensor cores, pipeline
CONVOLUTIONS = {
    "void implicit_convolve_sgemm<__nv_bfloat16": ("forward", "bfloat16", None, None, False, None),
    "sm80_xmma_fprop_implicit_gemm_bf16bf16": (
        *("forward", "bfloat16", (64, 32, 64), "sm80", True, "5 stages"),
    ),
    "s16816fprop_optimized_bf16_64x64_64x5": (
        *("forward", "bfloat16", (64, 64, 64), None, True, "5 stages"),
    ),
    "sm80_xmma_dgrad_implicit_gemm_bf16bf16": (
        *("backward", "bfloat16", (64, 64, 64), "sm80", True, "4 stages"),
    ),
    "sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16": (
        *("backward", "bfloat16", (64, 32, 64), "sm80", True, "5 stages"),
    ),
    "sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16": (
        *("backward", "bfloat16", (128, 128, 64), "sm90", True, None),
    ),
}


@pytest.mark.parametrize("part", CONVOLUTIONS)
def test_convolutions(part: str) -> None:
    k = the_one(part)
    assert (k.family, k.role, k.backend) == ("cudnn", "convolution", "cudnn")
    found = (k.pass_, k.dtype, k.tile, k.arch, k.tensor_cores, k.pipeline)
    assert found == CONVOLUTIONS[part]
    assert not k.is_attention


def test_words_of_a_convolution() -> None:
    assert the_one("sm80_xmma_wgrad_implicit_gemm_indexed").words == (
        "Convolution, gradient of the weights, of cuDNN, bf16, tile 64x32x64, 5 stages, "
        "on tensor cores, built for sm_80."
    )
    assert the_one("sm80_xmma_fprop_implicit_gemm").words.startswith("Convolution of cuDNN, bf16,")


def test_a_convolution_on_cuda_cores() -> None:
    k = decode(
        "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize32x32x8_stage3_"
        "warpsize1x2x1_g1_ffma_aligna4_alignc4_execute_kernel__5x_cudnn"
    )
    assert (k.dtype, k.tensor_cores) == ("float32", False)


# part of the name -> role, pass, dtype, what its words say
OTHERS = {
    "engines_precompiled::nchwToNhwcKernel<__nv_bfloat16": (
        *("copy", None, "bfloat16", "from the layout NCHW to NHWC"),
    ),
    "engines_precompiled::nhwcToNchwKernel<__nv_bfloat16": (
        *("copy", None, "bfloat16", "from the layout NHWC to NCHW"),
    ),
    "DeviceRadixSortOnesweepKernel": ("sort", None, None, "sort"),
    "DeviceUniqueByKeySweepKernel": ("sort", None, None, "equal keys"),
    "DeviceCompactInitKernel": ("sort", None, None, "equal keys"),
    "compute_num_of_partial_segments": ("reduction", "backward", "int64", "embedding"),
    "indexing_backward_kernel<c10::BFloat16": (
        *("reduction", "backward", "bfloat16", "gradient of a gather by index"),
    ),
    "unpack_cudnn": ("attention_part", "forward", None, "seed of its dropout"),
    "minimum_kernel_cuda": ("elementwise", None, "int64", "smaller or larger of two"),
    "remainder_kernel_cuda": ("elementwise", None, "int64", "remainder"),
    "AbsFunctor<long>": ("elementwise", None, "int64", "absolute value"),
    "div_trunc_kernel_cuda": ("elementwise", None, "int64", "divide with one number"),
    # the sums are float32, the operands are not
    "void gemmSN_NN_kernel<float, 128, 2, 4, 8, 4, 4, false, cublasGemvTensorStridedBatched<__nv": (
        *("matmul", None, "bfloat16", "small sizes"),
    ),
    "cutlass_75_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_nn": (
        *("matmul", None, "bfloat16", "tile 32x32x32, 1 stage, on tensor cores"),
    ),
    "cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_nn": (
        *("matmul", None, "bfloat16", "tile 64x64, on tensor cores"),
    ),
}


@pytest.mark.parametrize("part", OTHERS)
def test_what_else_these_models_run(part: str) -> None:
    k = the_one(part)
    role, pass_, dtype, words = OTHERS[part]
    assert (k.role, k.pass_, k.dtype) == (role, pass_, dtype)
    assert words in k.words
    assert k.family != "unknown"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("BUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor", 1),
        ("AUnaryFunctor<long, long, long, at::native::binary_internal::MulFunctor<long>", 1),
        ("CUDAFunctorOnSelf_add<long>", 1),
        ("BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor", 0),
    ],
)
def test_one_number_is_told_apart_from_a_second_tensor(part: str, words: int) -> None:
    names = [name for name in RECORDED if part in name]
    assert names
    assert all(("with one number" in decode(name).words) == bool(words) for name in names)


def test_copies_that_change_the_dtype_or_walk_strides_say_so() -> None:
    copies = [name for name in RECORDED if "copy_kernel_cuda" in name]
    found = {decode(name).words.split(", ")[0] + "." for name in copies}
    assert found == {"PyTorch: copy.", "PyTorch: change of dtype."}
    for name in copies:
        # the cast stands in how elements are loaded, or in a kernel of its own
        casts = "LoadWithCast" in name or "16_copy_kernel" in name or "kernel_impl<at" in name
        assert ("change of dtype" in decode(name).words) == casts
        strided = name.startswith("void at::native::elementwise_kernel")
        assert ("strided" in decode(name).words) == strided


@pytest.mark.parametrize(
    "name",
    [
        "sm80_xmma_fprop_" + "implicit_gemm_f16_nc_" * 900,
        "void cutlass__5x_cudnn::Kernel<" + "cutlass_tensorop_fprop_" * 800,
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_" + "fprop_1x1_" * 1900,
    ],
)
def test_repeated_words_do_not_take_long(name: str) -> None:
    started = time.perf_counter()
    assert decode(name).role != "convolution"
    assert time.perf_counter() - started < 1
