"""PyTorch's own kernels (ATen): elementwise, softmax, norms, reductions, copies, masks.

What an elementwise or reduction kernel does stands in its functor; the table below goes from the
most telling words to the least.
"""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import (
    DTYPES,
    KernelName,
    Pass,
    Role,
    dtype_words,
    sentence,
)
from flashdig.readers.kernel_names.symbol import Symbol

_FORWARD: Pass = "forward"
_BACKWARD: Pass = "backward"

# base name of the kernel -> role, pass, words
_KERNELS: tuple[tuple[str, Role, Pass | None, str], ...] = (
    (r"softmax_warp_forward|cunn_SoftMaxForward|softmax_forward", "softmax", _FORWARD, "softmax"),
    (
        r"softmax_warp_backward|cunn_SoftMaxBackward",
        "softmax",
        _BACKWARD,
        "gradient of softmax",
    ),
    (
        r"layer_norm_grad|GammaBetaBackward|LayerNormBackward|ComputeGradientFusedParams"
        r"|cuComputeGradInput|cuComputePartGradGammaBeta|rms_norm_grad",
        "norm",
        _BACKWARD,
        "gradient of a layer norm",
    ),
    (
        r"layer_norm|LayerNormForward|RowwiseMoments|rms_norm|cuApplyLayerNorm|GroupNorm"
        r"|batch_norm",
        "norm",
        None,
        "layer norm",
    ),
    (r"mbtopk|sbtopk|gatherTopK", "sort", None, "top-k"),
    (r"CatArrayBatchedCopy", "copy", None, "concatenation"),
    (
        r"indexSelect|vectorized_gather_kernel|index_elementwise_kernel|_scatter_gather_elementwise"
        r"|index_kernel",
        "copy",
        None,
        "gather or scatter by index",
    ),
    (
        r"embedding_backward|embedding_dense_backward|sum_and_scatter",
        "reduction",
        _BACKWARD,
        "gradient of an embedding",
    ),
    (r"indexing_backward_kernel", "reduction", _BACKWARD, "gradient of a gather by index"),
    (r"triu_tril_kernel", "elementwise", None, "triangle of a matrix (a mask is being built)"),
    (r"fused_dropout_kernel", "elementwise", _FORWARD, "dropout"),
    (r"distribution_", "elementwise", None, "random numbers"),
    (r"multi_tensor_apply_kernel", "elementwise", None, "one step over many tensors (optimizer)"),
    (r"nll_loss", "reduction", None, "negative log-likelihood"),
    (
        r"krn_partial|compute_grad_weight|compute_num_of_partial_segments",
        "reduction",
        _BACKWARD,
        "gradient of an embedding",
    ),
    (r"DeviceScan|scan_innermost|tensor_kernel_scan", "reduction", None, "running sum (scan)"),
    (r"DeviceReduce|DeviceSegmentedReduce", "reduction", None, "reduction"),
    (r"RadixSort|bitonicSort|DeviceMergeSort|radixSort", "sort", None, "sort"),
    (
        r"DeviceUniqueByKey|DeviceCompactInit",
        "sort",
        None,
        "first of each run of equal keys (unique)",
    ),
)

# functor inside an elementwise or reduction kernel -> role, words
_FUNCTORS: tuple[tuple[str, Role, str], ...] = (
    (r"masked_fill_kernel", "elementwise", "masked_fill"),
    (r"masked_scale_kernel", "elementwise", "gradient of dropout (masked scale)"),
    (r"where_kernel_impl", "elementwise", "where (choose by a mask)"),
    (r"(?:bfloat16|float16|float8_\w+)_copy_kernel", "copy", "change of dtype"),
    (r"direct_copy_kernel", "copy", "copy"),
    (r"FillFunctor", "elementwise", "fill with a constant"),
    (r"arange_cuda_out", "elementwise", "arange"),
    (r"ArgMaxOps|ArgMinOps", "reduction", "argmax or argmin"),
    (r"MeanOps", "reduction", "mean"),
    (r"MaxNanFunctor|MinNanFunctor|MaxOps|MinOps", "reduction", "maximum or minimum"),
    (r"sum_functor", "reduction", "sum"),
    (r"and_kernel_cuda", "reduction", "all"),
    (r"or_kernel_cuda", "reduction", "any"),
    (r"NormTwoOps|NormOneOps|NormOps", "reduction", "norm of a vector"),
    (r"CompareEqFunctor|CompareFunctor|compare_scalar_kernel", "elementwise", "comparison"),
    (r"Bitwise(And|Or|Xor)Functor|bitwise_not|logical_", "elementwise", "logic"),
    (r"isneginf_kernel", "elementwise", "is -inf (the safe softmax looks for masked rows)"),
    (r"GeluBackward", "elementwise", "gradient of GELU"),
    (r"Gelu", "elementwise", "GELU"),
    (r"silu_backward", "elementwise", "gradient of SiLU"),
    (r"silu_kernel", "elementwise", "SiLU"),
    (r"tanh_backward", "elementwise", "gradient of tanh"),
    (r"tanh_kernel", "elementwise", "tanh"),
    (r"exp_kernel", "elementwise", "exp"),
    (r"log_kernel_cuda", "elementwise", "logarithm"),
    (r"AbsFunctor", "elementwise", "absolute value"),
    (r"minimum_kernel|maximum_kernel", "elementwise", "smaller or larger of two"),
    (r"remainder_kernel", "elementwise", "remainder"),
    (r"rsqrt_kernel", "elementwise", "reciprocal square root"),
    (r"sqrt_kernel", "elementwise", "square root"),
    (r"pow_tensor_scalar", "elementwise", "power"),
    (r"(?<!r)cos_kernel", "elementwise", "cosine (rotary embedding)"),
    (r"sin_kernel", "elementwise", "sine (rotary embedding)"),
    (r"neg_kernel", "elementwise", "negation"),
    (r"MulFunctor", "elementwise", "multiply"),
    (r"DivFunctor|div_\w+_kernel", "elementwise", "divide"),
    (r"CUDAFunctor(?:OnSelf|OnOther)?_add", "elementwise", "add"),
    (r"clamp|threshold", "elementwise", "clamp"),
)
_ELEMENTWISE = re.compile(r"elementwise_kernel|elementwise_kernel_with_index")
_REDUCE = re.compile(r"^reduce_kernel$")


def decode(symbol: Symbol) -> KernelName | None:
    """A kernel of ATen, or of CUB inside it; None for anything else."""
    function = symbol.function
    ours = function.startswith(("at::", "at_cuda_detail::", "cub::")) or symbol.base.startswith(
        (
            *("softmax_warp_", "elementwise_kernel_with_index", "CatArrayBatchedCopy"),
            *("cunn_SoftMax", "indexing_backward_kernel"),
        )
    )
    if not ours:
        return None
    role, pass_, what = _meaning(symbol)
    dtype = _dtype(symbol)
    return KernelName(
        name=symbol.name,
        family="cub" if "cub::" in function else "aten",
        backend="aten",
        role=role,
        pass_=pass_,
        dtype=dtype,
        tensor_cores=False,
        words=sentence(f"PyTorch: {what}", dtype_words(dtype)),
    )


def _meaning(symbol: Symbol) -> tuple[Role, Pass | None, str]:
    function = symbol.function
    for pattern, role, pass_, what in _KERNELS:
        if re.search(pattern, function):
            is_log = role == "softmax" and _is_log_softmax(symbol)
            return role, pass_, what.replace("softmax", "log-softmax") if is_log else what
    reduces = _REDUCE.match(symbol.base) is not None
    if reduces or _ELEMENTWISE.search(symbol.base):
        functor = ", ".join(symbol.arguments)
        form = "" if reduces else _form(symbol.base, functor)
        for pattern, role, what in _FUNCTORS:
            if re.search(pattern, functor):
                casts = what == "copy" and re.search(r"LoadWithCast|gpu_kernel_impl<", functor)
                words = ("change of dtype" if casts else what) + form
                return role, _BACKWARD if "gradient" in what else None, words
        return ("reduction", None, "reduction") if reduces else ("elementwise", None, "elementwise")
    return "other", None, f"kernel {symbol.base or symbol.function}"


def _form(base: str, functor: str) -> str:
    """Whether the second operand is one number, and whether elements lie side by side."""
    number = re.search(r"[AB]UnaryFunctor|FunctorOn(Self|Other)|compare_scalar", functor)
    scalar = " with one number" if number else ""
    # PyTorch takes this kernel where an operand has strides, or is broadcast
    return scalar + (", strided or broadcast" if base == "elementwise_kernel" else "")


def _is_log_softmax(symbol: Symbol) -> bool:
    if "LogSoftMax" in symbol.text:
        return True
    # softmax_warp_forward<input, output, acc, log2_elements, is_log_softmax, is_masked>
    return symbol.base.startswith("softmax_warp_") and symbol.arguments[4:5] in (("true",), ("1",))


def _dtype(symbol: Symbol) -> str | None:
    """The type the kernel works on: its own template argument, the lambda's, or the functor's."""
    own = [DTYPES[a] for a in symbol.arguments if a in DTYPES]
    floating = [dtype for dtype in own if dtype.startswith(("float", "bfloat"))]
    if floating:
        return floating[0]
    if symbol.arguments and symbol.arguments[0] in ("bool", "long"):
        return DTYPES[symbol.arguments[0]]  # int and unsigned int are types of an index
    arguments = ", ".join(symbol.arguments)
    reduced = re.match(r".*?ReduceOp<\s*([\w: ]+?)\s*,", arguments)
    if reduced and reduced.group(1) in DTYPES:
        return DTYPES[reduced.group(1)]
    for types in reversed(re.findall(r"lambda\(([^()]*)\)", arguments)):
        names = [DTYPES[t.strip()] for t in types.split(",") if t.strip() in DTYPES]
        # lambda(int) is the index of the element in elementwise_kernel
        if names and types.strip() != "int":
            return next((name for name in names if name != "bool"), "bool")
    functor = re.search(r"(?:Functor\w*|Ops)<\s*([\w: ]+?)\s*[,>]", arguments)
    return DTYPES.get(functor.group(1)) if functor else None
