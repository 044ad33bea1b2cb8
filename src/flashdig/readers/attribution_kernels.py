"""Attention known by its kernels alone: no operator around them says what they belong to.

That is so for Nsight Systems files, CUDA graphs, and calls of libraries that record no operator.
A fused attention is its main kernel and the helpers next to it. An attention made of parts is a
softmax with its products, in the order of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flashdig.readers.attribution_calls import PartLabel
from flashdig.readers.kernel_names import KernelName, decode
from flashdig.readers.model import Kernel

_BETWEEN = {"elementwise", "copy", "reduction"}
_BATCHED = {"aten::bmm", "aten::baddbmm", "aten::matmul", "aten::einsum"}
_MAX_BETWEEN = 4


@dataclass
class KernelGroup:
    """The kernels of one attention, with labels; `name` is the main kernel's decoding."""

    name: KernelName
    backward: bool
    kernels: list[tuple[Kernel, PartLabel]] = field(default_factory=list)


def fused_groups(kernels: list[Kernel]) -> list[KernelGroup]:
    """Main kernels of attention with their helpers.

    Args:
        kernels: kernels that no operator accounts for, in order of start.
    """
    groups: list[KernelGroup] = []
    for lane in _lanes(kernels):
        groups.extend(_fused_in_lane(lane))
    return groups


def _lanes(kernels: list[Kernel]) -> list[list[Kernel]]:
    lanes: dict[tuple[int, int | None], list[Kernel]] = {}
    for kernel in kernels:
        lanes.setdefault((kernel.device, kernel.stream), []).append(kernel)
    return list(lanes.values())


def _fused_in_lane(lane: list[Kernel]) -> list[KernelGroup]:
    groups: list[KernelGroup] = []
    waiting: list[tuple[Kernel, KernelName]] = []  # first steps, before their main kernel
    for kernel in lane:
        name = decode(kernel.name)
        if not name.is_attention:
            continue
        backward = name.pass_ == "backward"
        open_group = groups[-1] if groups and groups[-1].backward == backward else None
        if name.role != "attention_part":
            if open_group is not None and _continues(open_group, name, waiting):
                open_group.kernels.append((kernel, "attention"))
                continue
            group = KernelGroup(name, backward)
            group.kernels.extend((k, "helper") for k, n in waiting if _belongs(n, group))
            waiting.clear()
            group.kernels.append((kernel, "attention"))
            groups.append(group)
        elif open_group is not None and _belongs(name, open_group) and not _is_first_step(name):
            open_group.kernels.append((kernel, "helper"))
        else:
            waiting.append((kernel, name))
    return groups


def _continues(group: KernelGroup, name: KernelName, waiting: Sequence[object]) -> bool:
    """True for the second main kernel of one backward: dk and dv first, then dq."""
    mains = [k for k, label in group.kernels if label == "attention"]
    return (
        group.backward
        and not waiting
        and name.family == group.name.family
        and name.name != group.name.name
        and len(mains) == 1
    )


def _belongs(name: KernelName, group: KernelGroup) -> bool:
    same_pass = (name.pass_ == "backward") == group.backward
    return name.family == group.name.family and same_pass


def _is_first_step(name: KernelName) -> bool:
    return "first step" in name.words or "before the forward" in name.words


def eager_groups(kernels: list[Kernel]) -> list[KernelGroup]:
    """Softmax kernels with the batched products around them, from the order on their stream.

    Forward: product, softmax, product. Backward: two products (dv, dp), the softmax's gradient, two
    products (dq, dk). In between stand at most a few elementwise kernels and copies.

    Args:
        kernels: kernels without an operator, in order of start.
    """
    groups = []
    for lane in _lanes(kernels):
        names = [decode(kernel.name) for kernel in lane]
        for at, name in enumerate(names):
            if name.role != "softmax" or "log-softmax" in name.words:
                continue
            backward = name.pass_ == "backward"
            products = 2 if backward else 1
            first = _reach(lane, names, at, -1, products)
            last = _reach(lane, names, at, +1, products)
            if first is None or last is None:
                continue
            group = KernelGroup(name, backward)
            for i in range(first, last + 1):
                group.kernels.append((lane[i], _eager_label(names[i], i < at, backward)))
            groups.append(group)
    return groups


def _reach(
    lane: list[Kernel], names: list[KernelName], at: int, step: int, products: int
) -> int | None:
    """Place of the last of `products` products on one side of the softmax; None without them."""
    between, seen, i = 0, 0, at + step
    while 0 <= i < len(names):
        if names[i].role == "matmul":
            if not _may_be_batched(lane[i]):
                return None
            seen += 1
            between = 0
            if seen == products:
                return i
        elif names[i].role in _BETWEEN and between < _MAX_BETWEEN:
            between += 1
        else:
            return None
        i += step
    return None


def _may_be_batched(kernel: Kernel) -> bool:
    op = kernel.op
    if op is None or kernel.graph_launch is not None or "bmm" in kernel.name:
        return True
    return op.name in _BATCHED or any(outer.name in _BATCHED for outer in op.ancestors())


def _eager_label(name: KernelName, before: bool, backward: bool) -> PartLabel:
    if name.role == "matmul":
        return "scores" if before != backward else "values"
    if name.role == "softmax":
        return "softmax"
    if "dropout" in name.words:
        return "dropout"
    if "mask" in name.words:
        return "mask"
    return "copy" if name.role == "copy" else "other"
