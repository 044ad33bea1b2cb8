"""Matrix products of cuBLAS and CUTLASS: gemm, gemv and the split-k sums that go with them.

Names: `ampere_bf16_s16816gemm_bf16_128x128_...` (s16816: the tensor-core instruction m16n8k16 with
float32 sums; s1688, s884 and h16816 likewise; sgemm, dgemm: plain FMAs), `sm80_xmma_gemm_...`
(`ffma` or `tensor16x8x16` near the end), `nvjet_...` (Hopper and later), `cutlass_80_tensorop_...`
and `cutlass3x_sm90_...` inside `cutlass::Kernel2` or `cutlass::device_kernel`, gemv kernels.
"""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import (
    DTYPES,
    KernelName,
    arch_words,
    dtype_words,
    sentence,
    tensor_core_words,
    tile_words,
)
from flashdig.readers.kernel_names.symbol import Symbol

_CHIPS = {"maxwell": "sm50", "volta": "sm70", "turing": "sm75", "ampere": "sm80", "ada": "sm89"}
_LEGACY = re.compile(
    r"^(?P<chip>maxwell|volta|turing|ampere|ada)_(?:(?P<dtype>bf16|fp16|int8|tf32|fp8)_)?"
    r"(?P<instruction>[shdicz]?(?:16816|1688|884|161616|16832|64x\w+?)?)gemm"
)
_TILE = re.compile(r"(?:^|_)(?:tilesize)?(\d{1,4})x(\d{1,4})(?:x(\d{1,4}))?(?=_)")
_XMMA = re.compile(r"^sm(?P<arch>\d{2,3})_xmma_(?:gemm|fprop|dgrad|wgrad)_(?P<types>\w+?)_[nt]{2}_")
_NVJET = re.compile(
    r"^nvjet_(?:sm(?P<arch>\d{2,3})_)?(?P<types>[a-z]{3,6})_(?:mma_)?"
    r"(?P<m>\d{1,4})x(?P<n>\d{1,4})_(?P<k>\d{1,4})x(?P<stages>\d{1,3})_"
)
_NVJET_ANY = re.compile(r"^nvjet_(?:sm(?P<arch>\d{2,3})_)?(?P<types>[a-z]{3,6})_")
# first letter of nvjet's type code: recordings of bf16 models show t, of fp16 ones h, of fp8 q;
# other letters are left unknown
_NVJET_TYPES = {"t": "bfloat16", "h": "float16", "q": "float8_e4m3fn"}
_CUTLASS = re.compile(
    r"cutlass(?:3x)?_(?:sm)?(?P<arch>\d{2,3})_(?P<unit>tensorop|simt|wmma_tensorop)_"
    r"(?P<middle>\w*?gemm)_?"
)
_GEMV = ("gemv2T_kernel_val", "gemv2N_kernel", "gemvNSP_kernel", "gemv2T_kernel", "gemvNSP_kernel")
_SMALL_GEMM = ("gemmk1_kernel", "gemmSN_TN_kernel", "gemmSN_NN_kernel", "gemm_kernel2x2_core")


def decode(symbol: Symbol) -> KernelName | None:
    """A matrix product of cuBLAS or CUTLASS; None for anything else."""
    for read in (_nvjet, _xmma, _legacy, _cutlass, _template):
        found = read(symbol)
        if found is not None:
            return found
    return None


def _matmul(
    symbol: Symbol,
    family: str,
    what: str,
    *,
    dtype: str | None = None,
    tile: tuple[int, ...] | None = None,
    arch: str | None = None,
    tensor_cores: bool | None = None,
    pipeline: str | None = None,
) -> KernelName:
    return KernelName(
        name=symbol.name,
        family=family,
        backend=family,
        role="matmul",
        dtype=dtype,
        tile=tile,
        arch=arch,
        tensor_cores=tensor_cores,
        pipeline=pipeline,
        words=sentence(
            what,
            dtype_words(dtype),
            tile_words(tile),
            pipeline,
            tensor_core_words(tensor_cores),
            arch_words(arch),
        ),
    )


def _nvjet(symbol: Symbol) -> KernelName | None:
    found = _NVJET.match(symbol.text) or _NVJET_ANY.match(symbol.text)
    if found is None:
        return None
    whole = found.groupdict()
    dtype = _NVJET_TYPES.get(whole["types"][0])
    tile = None
    pipeline = []
    if whole.get("m"):
        tile = (int(whole["m"]), int(whole["n"]), int(whole["k"]))
        pipeline.append(_stages(int(whole["stages"])))
    cluster = re.search(r"_(\d{1,2}x\d{1,2})_(?:2cta_)?[hv]_", symbol.text)
    if cluster:
        pipeline.append(f"cluster {cluster.group(1)}")
    for letters, words in (("splitK", "split-k"), ("coop", "cooperative"), ("_bias_", "bias")):
        if letters in symbol.text:
            pipeline.append(words)
    return _matmul(
        symbol,
        "cublas",
        "Matrix product of cuBLAS (nvjet, for Hopper and later)",
        dtype=dtype,
        tile=tile,
        arch=f"sm{whole['arch']}" if whole["arch"] else None,
        tensor_cores=None if dtype is None else True,
        pipeline=", ".join(pipeline) or None,
    )


def _xmma(symbol: Symbol) -> KernelName | None:
    found = _XMMA.match(symbol.text)
    if found is None:
        return None
    text = symbol.text
    # f32f32_tf32f32_f32: the operands in memory, then how they are multiplied
    multiplied = re.search(r"_(tf32|bf16|f16|f32|f64|e4m3|e5m2|i8)", "_" + found["types"])
    second = found["types"].split("_")
    dtype = DTYPES.get(multiplied.group(1)) if multiplied else None
    if any(part.startswith("tf32") for part in second):
        dtype = "tf32"
    tensor_cores = False if "_ffma_" in text or "_dfma_" in text else None
    if re.search(r"_tensor\d|_warpgroupsize|_mma\d", text):
        tensor_cores = True
    stage = re.search(r"_stage(\d{1,2})_", text)
    return _matmul(
        symbol,
        "cublas",
        "Matrix product of cuBLAS (xmma)",
        dtype=dtype,
        tile=_tile(text),
        arch=f"sm{found['arch']}",
        tensor_cores=tensor_cores,
        pipeline=_stages(int(stage.group(1))) if stage else None,
    )


def _tile(text: str) -> tuple[int, ...] | None:
    found = _TILE.search(text)
    return None if found is None else tuple(int(n) for n in found.groups() if n)


def _stages(count: int) -> str:
    return f"{count} stage" + ("s" if count != 1 else "")


def _legacy(symbol: Symbol) -> KernelName | None:
    found = _LEGACY.match(symbol.text)
    if found is None:
        return None
    instruction = found["instruction"]
    digits = instruction.lstrip("shdicz")
    letter = instruction[:1]
    dtype: str | None
    if found["dtype"]:
        dtype = DTYPES.get(found["dtype"], found["dtype"])
    elif not digits:
        dtype = {"s": "float32", "d": "float64", "h": "float16", "i": "int8"}.get(letter)
    else:
        dtype = "float16" if letter == "h" else None
    tile = _tile(symbol.text[found.end() :] + "_")
    # stages_32x3: three stages of 32 along k
    stages = re.search(r"_stages_(\d{1,4})x(\d{1,3})(?=_|$)", symbol.text)
    if stages and tile is not None and len(tile) == 2:
        tile = (*tile, int(stages.group(1)))
    words = [
        f"instruction {instruction}" if digits else "",
        _stages(int(stages.group(2))) if stages else "",
    ]
    return _matmul(
        symbol,
        "cublas",
        "Matrix product of cuBLAS",
        dtype=dtype,
        tile=tile,
        arch=_CHIPS[found["chip"]],
        tensor_cores=bool(digits),
        pipeline=", ".join(w for w in words if w) or None,
    )


def _cutlass(symbol: Symbol) -> KernelName | None:
    found = _CUTLASS.search(symbol.text)
    if found is None:
        return None
    rest = symbol.text[found.end() :]
    word = re.search(r"bf16|tf32|f16|fp16|e4m3|e5m2|s8", found["middle"] + "_" + rest[:40])
    dtype = DTYPES.get(word.group(), None) if word else None
    if dtype is None and re.search(r"(^|_)sgemm$", found["middle"]):
        dtype = "float32"
    tensor_cores = found["unit"] != "simt"
    pipeline = [w for w in ("pingpong", "cooperative") if w in rest]
    tile = _tile("_" + rest + "_")
    # 128x32_8x5: a tile of 128 x 32, five stages of 8 along k
    stages = re.match(r"\w*?\d+x\d+_(\d{1,4})x(\d{1,3})_", rest)
    if stages and tile is not None and len(tile) == 2:
        tile = (*tile, int(stages.group(1)))
        pipeline.append(_stages(int(stages.group(2))))
    return _matmul(
        symbol,
        "cutlass",
        "Matrix product of CUTLASS",
        dtype=dtype,
        tile=tile,
        arch=f"sm{found['arch']}",
        tensor_cores=tensor_cores,
        pipeline=", ".join(pipeline) or None,
    )


def _template(symbol: Symbol) -> KernelName | None:
    """Kernels that are C++ templates: gemv, small gemm, split-k sums, DeepGEMM."""
    if "splitKreduce_kernel" in symbol.base:
        return KernelName(
            name=symbol.name,
            family="cublas",
            backend="cublas",
            role="reduction",
            dtype=_first(symbol),
            tensor_cores=False,
            words="cuBLAS sums the partial results of a matrix product that was split along k.",
        )
    if symbol.function in ("internal::gemvx::kernel", "gemvx::kernel") or symbol.base in _GEMV:
        return _matmul(
            symbol,
            "cublas",
            "Matrix times vector of cuBLAS (gemv)",
            dtype=_first(symbol),
            tensor_cores=False,
        )
    if symbol.base in _SMALL_GEMM:
        return _matmul(
            symbol,
            "cublas",
            "Matrix product of cuBLAS for small sizes",
            dtype=_of_tensors(symbol) or _first(symbol),
            tensor_cores=False,
        )
    if symbol.function.startswith("deep_gemm::"):
        return _matmul(
            symbol,
            "deep_gemm",
            "Matrix product of DeepGEMM",
            dtype="float8_e4m3fn" if "fp8" in symbol.base else None,
            arch="sm90" if "sm90" in symbol.base else None,
            tensor_cores=True,
        )
    return None


def _of_tensors(symbol: Symbol) -> str | None:
    """The operands' type where the name says it apart from the type of the sums."""
    found = re.search(r"cublasGemvTensor\w*<(\w+)(?: const)?>", symbol.text)
    return DTYPES.get(found.group(1)) if found else None


def _first(symbol: Symbol) -> str | None:
    """The first floating type among the template arguments."""
    for argument in symbol.arguments:
        dtype = DTYPES.get(argument)
        if dtype is not None and not dtype.startswith(("int", "uint", "bool")):
            return dtype
    return None
