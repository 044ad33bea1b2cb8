"""Operators that are an attention by themselves: which ones, and what their arguments say.

Argument positions as in PyTorch's native_functions.yaml, and in the Python interfaces of
flash-attn 2, 3, 4 and xformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from flashdig.readers.attribution_calls import MaskUse, PartLabel, Sizes
from flashdig.readers.kernel_names import decode
from flashdig.readers.kernel_names.kernel_name import DTYPES
from flashdig.readers.model import HostOp

Layout = Literal["heads_first", "sequence_first", "packed"]

_ENTRY = re.compile(
    r"^(?:"
    r"aten::(?:scaled_dot_product_attention|_scaled_dot_product_\w*attention\w*"
    r"|_(?:flash|efficient|cudnn)_attention_forward)"
    r"|flash_attn\w*::\w*(?:fwd|forward)\w*"
    r"|FlashAttn\w*Func"
    r"|xformers\w*::\w*(?:fwd|forward)\w*"
    r"|flashdig::\w*attention\w*"
    r"|vllm::unified_attention\w*"
    r")$"
)
_BACKWARD = re.compile(r"backward|bwd", re.IGNORECASE)
# part of an operator's name -> backend
_BACKENDS = (
    ("_scaled_dot_product_attention_math", "math"),
    ("_scaled_dot_product_flash_attention", "flash"),
    ("_scaled_dot_product_efficient_attention", "efficient"),
    ("_scaled_dot_product_cudnn_attention", "cudnn"),
    ("_scaled_dot_product_fused_attention_overrideable", "overrideable"),
    ("_flash_attention_", "flash"),
    ("_efficient_attention_", "efficient"),
    ("_cudnn_attention_", "cudnn"),
    ("flash_attn_3::", "flash_attention_3"),
    ("flash_attn_2::", "flash_attention_2"),
    ("flash_attn::", "flash_attention_2"),
    ("xformers", "xformers"),
    ("flashdig::", "flashdig"),
    ("vllm::", "vllm"),
)


@dataclass(frozen=True)
class _Signature:
    """Where the arguments stand: of the query, the mask tensor, dropout_p and is_causal."""

    layout: Layout
    query: int = 0
    mask: int | None = None
    dropout: int | None = None
    causal: int | None = None


_SIGNATURES = {
    "aten::scaled_dot_product_attention": _Signature("heads_first", 0, 3, 4, 5),
    "aten::_scaled_dot_product_attention_math": _Signature("heads_first", 0, 3, 4, 5),
    "aten::_scaled_dot_product_flash_attention": _Signature("heads_first", 0, None, 3, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Signature("heads_first", 0, 5, 3, 4),
    "aten::_scaled_dot_product_efficient_attention": _Signature("heads_first", 0, 3, 5, 6),
    "aten::_scaled_dot_product_cudnn_attention": _Signature("heads_first", 0, 3, 5, 6),
    "aten::_scaled_dot_product_fused_attention_overrideable": _Signature("heads_first", 0, 3, 4, 5),
    "aten::_flash_attention_forward": _Signature("sequence_first", 0, None, 7, 8),
    "aten::_efficient_attention_forward": _Signature("sequence_first", 0, 3, 8, 9),
    "aten::_cudnn_attention_forward": _Signature("heads_first", 0, 3, 9, 10),
    # backward operators: the gradient of the output comes first
    "aten::_scaled_dot_product_flash_attention_backward": _Signature("heads_first", 1),
    "aten::_scaled_dot_product_efficient_attention_backward": _Signature("heads_first", 1),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Signature("heads_first", 1),
    "aten::_flash_attention_backward": _Signature("sequence_first", 1),
    "aten::_efficient_attention_backward": _Signature("sequence_first", 1),
    "aten::_cudnn_attention_backward": _Signature("heads_first", 1),
}


@lru_cache(maxsize=4096)
def is_attention_operator(name: str) -> bool:
    """True for a forward operator that computes one attention and nothing else."""
    if _ENTRY.match(name):
        return _BACKWARD.search(name) is None
    # compiled code names its operators after the kernels: triton_tem_fused_flex_attention_0
    if not name.startswith("triton_"):
        return False
    found = decode(name)
    return found.role == "attention_forward" and found.family != "unknown"


def backend_of_operator(name: str) -> str | None:
    """The backend that an operator's name tells; None for the dispatching ones."""
    return next((backend for part, backend in _BACKENDS if part in name), None)


def tensors(op: HostOp) -> list[tuple[int, ...] | None]:
    """Sizes of each argument that is one tensor, None for the other arguments."""
    if op.inputs is None:
        return []
    found: list[tuple[int, ...] | None] = []
    for shape in op.inputs.shapes:
        sizes = tuple(size for size in shape if isinstance(size, int))
        found.append(sizes if sizes and len(sizes) == len(shape) else None)
    return found


def dtype_of(op: HostOp, argument: int) -> str | None:
    """torch's name of an argument's dtype; None where not recorded or no tensor."""
    if op.inputs is None or argument >= len(op.inputs.dtypes):
        return None
    return DTYPES.get(op.inputs.dtypes[argument])


def read_sizes(op: HostOp) -> Sizes:
    """Sizes from the operator's query, key and value; all None where shapes are missing."""
    signature = _SIGNATURES.get(op.name)
    first = signature.query if signature else 0
    shapes = tensors(op)[first : first + 3]
    if len(shapes) < 3 or any(shape is None for shape in shapes):
        return Sizes(dtype=dtype_of(op, first))
    query, key, value = (shape or () for shape in shapes)
    return sizes_from_shapes(query, key, value, _layout(op, signature, query), dtype_of(op, first))


def _layout(op: HostOp, signature: _Signature | None, query: tuple[int, ...]) -> Layout:
    if signature is not None:
        # nested or packed input of the low-level operators is (total, heads, head_dim)
        return (
            "packed"
            if len(query) == 3 and signature.layout == "sequence_first"
            else (signature.layout)
        )
    if "flash_attn" in op.name or "FlashAttn" in op.name or "xformers" in op.name:
        return "packed" if len(query) == 3 else "sequence_first"
    return "heads_first" if op.name.startswith("triton_") else "sequence_first"


def sizes_from_shapes(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    layout: Layout,
    dtype: str | None,
) -> Sizes:
    """Sizes of (batch, heads, seqlen, dim), (batch, seqlen, heads, dim) or (total, heads, dim)."""
    if layout == "packed" and len(query) == len(key) == len(value) == 3:
        return Sizes(
            num_heads=query[1],
            num_heads_kv=key[1],
            seqlen_q=query[0],
            seqlen_k=key[0],
            head_dim=query[2],
            head_dim_v=value[2],
            dtype=dtype,
            packed=True,
        )
    if len(query) == len(key) == len(value) == 3:  # one head: (batch, seqlen, dim)
        query, key, value = ((s[0], 1, s[1], s[2]) for s in (query, key, value))
        layout = "heads_first"
    if not len(query) == len(key) == len(value) == 4:
        return Sizes(dtype=dtype)
    head, row = (1, 2) if layout == "heads_first" else (2, 1)
    return Sizes(
        batch=query[0],
        num_heads=query[head],
        num_heads_kv=key[head],
        seqlen_q=query[row],
        seqlen_k=key[row],
        head_dim=query[3],
        head_dim_v=value[3],
        dtype=dtype,
    )


def read_mask(op: HostOp) -> MaskUse:
    """Mask of a forward operator, from its arguments."""
    if op.inputs is None:
        return MaskUse()
    if op.name.startswith("triton_"):
        # integer tensors behind q, k, v and the outputs are the block mask
        masked = any(dtype in ("int", "long int", "long") for dtype in op.inputs.dtypes)
        return MaskUse("block" if masked else "none")
    signature = _SIGNATURES.get(op.name)
    if signature is None:
        # flash-attn's interfaces differ, but causal is the first flag in all of them
        values = op.inputs.values
        at = next((i for i, value in enumerate(values) if value in ("True", "False")), None)
        if at is None:
            return MaskUse()
        window = _window(values[at + 1 : at + 3]) if "::" in op.name else None
        if values[at] == "True":
            return MaskUse("causal", "bottom-right", window)
        return MaskUse("none") if window is None else MaskUse("window", "bottom-right", window)
    mask = signature.mask
    shapes = tensors(op)
    if mask is not None and mask < len(shapes) and shapes[mask] is not None:
        return MaskUse("tensor")
    value = _value(op, signature.causal)
    if value in ("True", "1"):
        return MaskUse("causal", "top-left")
    if value == "2":  # _efficient_attention_forward's custom_mask_type
        return MaskUse("causal", "bottom-right")
    return MaskUse("none") if value in ("False", "0") else MaskUse()


def _window(sides: tuple[str, ...]) -> tuple[int | None, int | None] | None:
    """window_size_left and _right, which follow `causal`; None where nothing is limited."""
    if len(sides) < 2 or not all(re.fullmatch(r"-1|[0-9]{1,9}", side) for side in sides):
        return None
    left, right = (None if side == "-1" else int(side) for side in sides)
    return None if left is None and right is None else (left, right)


def read_dropout(op: HostOp) -> bool | None:
    """True or False where the operator's dropout_p is recorded."""
    signature = _SIGNATURES.get(op.name)
    value = _value(op, signature.dropout) if signature else None
    try:
        return None if not value else float(value) > 0
    except ValueError:
        return None


def _value(op: HostOp, argument: int | None) -> str | None:
    if argument is None or op.inputs is None or argument >= len(op.inputs.values):
        return None
    return op.inputs.values[argument]


# operators and autograd nodes inside of an attention operator: without "aten::" and "Backward0"
_STEPS: dict[str, PartLabel] = {
    **dict.fromkeys(
        # the safe softmax also looks for rows whose keys are all hidden
        ("softmax", "safe_softmax", "safesoftmax", "softmax_backward_data"),
        "softmax",
    ),
    **dict.fromkeys(
        ("dropout", "native_dropout", "nativedropout", "native_dropout_backward"), "dropout"
    ),
    **dict.fromkeys(("mul", "div"), "scale"),
    **dict.fromkeys(("to_copy", "tocopy"), "cast"),
    **dict.fromkeys(
        ("where", "add", "masked_fill", "maskedfill", "scalar_tensor", "ones", "tril", "triu"),
        "mask",
    ),
    "logical_not": "mask",
}


def label_of_step(name: str) -> PartLabel | None:
    """What an operator or autograd node inside of an attention does; None where it only wraps."""
    word = re.sub(r"Backward\d*$", "", name.rsplit(": ", 1)[-1].removeprefix("aten::"))
    return _STEPS.get(word.strip("_").lower())
