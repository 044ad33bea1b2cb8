"""Attention made of parts: product, scale, mask, softmax, product, found by dataflow and order.

Around every softmax, the product before it must give what the softmax reads (same last dimension,
same number of elements), and the product behind it must read what the softmax gives. Without
recorded shapes the order alone decides. A router's or sampler's softmax has no product behind it
that reads its result, and is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from flashdig.readers.attribution_calls import MaskUse, PartLabel, Sizes
from flashdig.readers.attribution_operators import dtype_of, tensors
from flashdig.readers.model import HostOp

_PRODUCTS = {"aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum"}
_SOFTMAX = {"aten::softmax", "aten::_softmax", "aten::_safe_softmax"}
_LINEAR = {"aten::linear", "aten::addmm", "aten::mm"}
_VIEWS = {
    *("aten::transpose", "aten::t", "aten::permute", "aten::reshape", "aten::view"),
    *("aten::_unsafe_view", "aten::expand", "aten::unsqueeze", "aten::squeeze", "aten::slice"),
    *("aten::select", "aten::narrow", "aten::as_strided", "aten::contiguous", "aten::clone"),
    *("aten::alias", "aten::detach", "aten::flatten", "aten::unflatten"),
    "aten::repeat_interleave",
}
# operators that only wrap others: what is inside them is looked at
_TRANSPARENT = {"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"}
_LABELS: dict[str, PartLabel] = {
    "mul": "scale",
    "div": "scale",
    "mul_": "scale",
    "div_": "scale",
    "tanh": "softcap",
    "masked_fill": "mask",
    "masked_fill_": "mask",
    "where": "mask",
    "add": "mask",
    "add_": "mask",
    "sub": "mask",
    "softmax": "softmax",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "dropout": "dropout",
    "native_dropout": "dropout",
    "to": "cast",
    "_to_copy": "cast",
}
# how far the two products may stand from the softmax, in operators
_REACH = 80
_REACH_WITHOUT_SHAPES = 12

Shape = tuple[int, ...]


@dataclass
class EagerAttention:
    """The operators of one attention made of parts, in order, each with its label."""

    operators: list[tuple[HostOp, PartLabel]]
    scores: HostOp
    values: HostOp
    sizes: Sizes
    mask: MaskUse
    dropout: bool | None


@dataclass
class _Lane:
    """The outermost operators of one thread, and the bmm inside those that hide their shapes."""

    operators: list[HostOp] = field(default_factory=list)
    inner_bmm: dict[int, HostOp] = field(default_factory=dict)
    end_ns: int = -1


@dataclass(frozen=True)
class _Product:
    left: Shape
    right: Shape

    @property
    def rows(self) -> int:
        return self.left[-2]

    @property
    def inner(self) -> int:
        return self.left[-1]

    @property
    def columns(self) -> int:
        return self.right[-1]

    @property
    def batch(self) -> Shape:
        return max(self.left[:-2], self.right[:-2], key=math.prod)

    @property
    def size(self) -> int:
        return math.prod(self.batch) * self.rows * self.columns


def find_eager_attention(host_ops: Iterable[HostOp]) -> list[EagerAttention]:
    """All attentions made of parts among the forward operators.

    Args:
        host_ops: a trace's host ops in order of start, without those inside of operators that
            are an attention by themselves.
    """
    found = []
    for lane in _lanes(host_ops):
        softmaxes = [i for i, op in enumerate(lane.operators) if op.name in _SOFTMAX]
        last_end = -1  # the operators of one attention are not looked at again
        for at in softmaxes:
            attention = _around(lane, at, last_end)
            if attention is not None:
                found.append(attention)
                last_end = lane.operators.index(attention.values, at)
    return found


def _lanes(host_ops: Iterable[HostOp]) -> list[_Lane]:
    lanes: dict[int, _Lane] = {}
    for op in host_ops:
        if op.kind != "operator" or "::" not in op.name:
            continue
        if op.name.startswith("autograd::") or op.name in _TRANSPARENT:
            continue
        lane = lanes.setdefault(op.thread, _Lane())
        if op.start_ns < lane.end_ns:
            if op.name == "aten::bmm":
                lane.inner_bmm.setdefault(id(lane.operators[-1]), op)
            continue
        lane.operators.append(op)
        lane.end_ns = op.end_ns
    return list(lanes.values())


def _around(lane: _Lane, at: int, first_allowed: int) -> EagerAttention | None:
    softmax = lane.operators[at]
    shape = next((s for s in tensors(softmax) if s), None)
    if softmax.inputs is not None and (shape is None or len(shape) < 3):
        return None
    if shape is not None and not _over_last_dimension(softmax, shape):
        return None
    before = _scores_before(lane, at, first_allowed, shape)
    after = _values_after(lane, at, shape)
    if before is None or after is None:
        return None
    return _assemble(lane, before, at, after, shape)


def _over_last_dimension(softmax: HostOp, shape: Shape) -> bool:
    values = softmax.inputs.values if softmax.inputs is not None else ()
    return len(values) < 2 or values[1] in ("", "-1", str(len(shape) - 1))


def _scores_before(lane: _Lane, at: int, first_allowed: int, shape: Shape | None) -> int | None:
    reach = _REACH if shape else _REACH_WITHOUT_SHAPES
    for i in range(at - 1, max(first_allowed, at - reach - 1), -1):
        op = lane.operators[i]
        if op.name in _LINEAR or op.name in _SOFTMAX:
            return None
        if op.name not in _PRODUCTS:
            continue
        if shape is None:
            return i
        product = _product(lane, op)
        return i if product is not None and _gives(product, shape) else None
    return None


def _values_after(lane: _Lane, at: int, shape: Shape | None) -> int | None:
    reach = _REACH if shape else _REACH_WITHOUT_SHAPES
    for i in range(at + 1, min(len(lane.operators), at + reach + 1)):
        op = lane.operators[i]
        if op.name in _SOFTMAX or (shape is None and op.name in _LINEAR):
            return None
        if op.name not in _PRODUCTS:
            continue
        if shape is None:
            return i
        product = _product(lane, op)
        return i if product is not None and _reads(product, shape) else None
    return None


def _product(lane: _Lane, op: HostOp) -> _Product | None:
    """The two factors of a batched product; None where they are not recorded or do not fit."""
    source = op
    if op.name == "aten::einsum":
        source = lane.inner_bmm.get(id(op), op)
    shapes = [s for s in tensors(source) if s]
    if source.name == "aten::baddbmm":
        shapes = shapes[1:]
    if len(shapes) < 2:
        return None
    left, right = shapes[:2]
    if len(left) < 3 or len(right) < 3 or left[-1] != right[-2]:
        return None
    return _Product(left, right)


def _gives(product: _Product, shape: Shape) -> bool:
    """True when the product's result has the softmax's elements (or all but a sink's column)."""
    rows = math.prod(shape[:-1])
    return any(
        product.columns == columns and product.size == rows * columns
        for columns in (shape[-1], shape[-1] - 1)
        if columns > 0
    )


def _reads(product: _Product, shape: Shape) -> bool:
    rows = math.prod(shape[:-1])
    return any(
        product.left[-1] == columns and math.prod(product.left) == rows * columns
        for columns in (shape[-1], shape[-1] - 1)
        if columns > 0
    )


def _assemble(lane: _Lane, before: int, at: int, after: int, shape: Shape | None) -> EagerAttention:
    scores, values = lane.operators[before], lane.operators[after]
    operators: list[tuple[HostOp, PartLabel]] = []
    heads_kv = _repeated_heads(lane, before, shape, operators)
    operators.append((scores, "scores"))
    masked = scores.name == "aten::baddbmm"  # its first argument is a bias (ALiBi)
    for i in range(before + 1, after):
        op = lane.operators[i]
        if i != at and not _touches(op, shape):
            continue
        label = _label(op, shape)
        # without shapes an addition may as well be one of a constant
        certain = shape is not None or "fill" in op.name or "where" in op.name
        masked = masked or (label == "mask" and i < at and certain)
        operators.append((op, label))
    operators.append((values, "values"))
    return EagerAttention(
        operators=operators,
        scores=scores,
        values=values,
        sizes=_sizes(lane, operators, shape, heads_kv),
        mask=MaskUse("tensor" if masked else "none" if shape else "unknown"),
        dropout=_dropout(operators),
    )


def _touches(op: HostOp, shape: Shape | None) -> bool:
    """True when an operator works on the scores, or on something that broadcasts to them."""
    if op.name in _LINEAR:
        return False
    if shape is None:
        return op.name.removeprefix("aten::") in _LABELS
    size = math.prod(shape)
    for tensor in tensors(op):
        if tensor is None:
            continue
        if tensor[-1] == shape[-1] and math.prod(tensor) == size:
            return True
        if len(tensor) >= 2 and tensor[-2:] == shape[-2:]:
            return True
    return False


def _label(op: HostOp, shape: Shape | None) -> PartLabel:
    label = _LABELS.get(op.name.removeprefix("aten::"), "other")
    if label == "scale" and len([s for s in tensors(op) if s and math.prod(s) > 1]) > 1:
        # a tensor of the scores' size times another one hides keys as well
        return "mask"
    if label == "mask" and op.name.endswith(("add", "add_", "sub")):
        full = shape is not None and len([s for s in tensors(op) if s]) > 1
        return "mask" if full or shape is None else "other"
    return label


def _dropout(operators: list[tuple[HostOp, PartLabel]]) -> bool | None:
    """True or False; None for a dropout whose probability is not recorded."""
    used: bool | None = False
    for op, label in operators:
        if label != "dropout":
            continue
        if op.inputs is None:
            return None
        values = [value for value in op.inputs.values if value]
        used = used or ("True" in values and values[0] not in ("0.", "0", "0.0"))
    return used


def _repeated_heads(
    lane: _Lane, before: int, shape: Shape | None, operators: list[tuple[HostOp, PartLabel]]
) -> int | None:
    """KV heads before they were repeated for the query heads (GQA); the copies become parts.

    The repetition is a copy of (batch, heads_kv, repeats, seqlen, dim) just before the product.
    """
    if shape is None or len(shape) != 4:
        return None
    heads_kv = None
    copies: list[tuple[HostOp, PartLabel]] = []
    for i in range(before - 1, max(-1, before - 40), -1):
        op = lane.operators[i]
        if op.name not in _VIEWS:
            break
        first = next((s for s in tensors(op) if s), None)
        if first and len(first) == 5 and first[1] * first[2] == shape[1] and first[2] > 1:
            heads_kv = first[1]
            copies.append((op, "copy"))
    operators.extend(reversed(copies))
    return heads_kv


def _sizes(
    lane: _Lane,
    operators: list[tuple[HostOp, PartLabel]],
    shape: Shape | None,
    heads_kv: int | None,
) -> Sizes:
    scores = next(op for op, label in operators if label == "scores")
    left, right = _product(lane, scores), _product(lane, operators[-1][0])
    argument = 1 if scores.name == "aten::baddbmm" else 0
    dtype = dtype_of(scores, argument)
    if scores.name == "aten::einsum" and id(scores) in lane.inner_bmm:
        dtype = dtype_of(lane.inner_bmm[id(scores)], 0)
    if left is None or right is None or shape is None:
        return Sizes(dtype=dtype)
    batch, num_heads = _batch_and_heads(operators, (left.batch, shape[:-2], right.batch), shape)
    return Sizes(
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=heads_kv if heads_kv is not None else num_heads,
        seqlen_q=shape[-2],
        seqlen_k=left.columns,
        head_dim=left.inner,
        head_dim_v=right.columns,
        dtype=dtype,
        batch_times_heads=math.prod(left.batch),
    )


def _batch_and_heads(
    operators: list[tuple[HostOp, PartLabel]], leading: tuple[Shape, ...], shape: Shape
) -> tuple[int, int] | tuple[None, None]:
    """The two leading sizes of whatever sees the scores in four dimensions."""
    for sizes in leading:
        if len(sizes) == 2:
            return sizes[0], sizes[1]
    for op, _ in operators:
        for tensor in tensors(op):
            four = tensor is not None and len(tensor) == 4 and tensor[2:] == shape[-2:]
            if tensor is not None and four and math.prod(tensor) == math.prod(shape):
                return tensor[0], tensor[1]
    return None, None
