"""Which attention ran where: `attention_calls(trace)`.

Four ways lead from device events to calls, the surest first: operators that are an attention by
themselves; operators that make one together; autograd nodes of either, for the backward; and what
no operator accounts for, by the kernels' names and order. Each event belongs to one call at most.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from flashdig.readers.attribution_calls import (
    AttentionCall,
    MaskUse,
    Part,
    PartLabel,
    Sizes,
)
from flashdig.readers.attribution_eager import EagerAttention, find_eager_attention
from flashdig.readers.attribution_kernels import KernelGroup, eager_groups, fused_groups
from flashdig.readers.attribution_operators import (
    backend_of_operator,
    is_attention_operator,
    label_of_step,
    read_dropout,
    read_mask,
    read_sizes,
)
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import Copy, DeviceEvent, HostOp, Kernel, Trace

__all__ = ["AttentionCall", "MaskUse", "Part", "Sizes", "attention_calls"]


def attention_calls(trace: Trace) -> list[AttentionCall]:
    """Every attention of the recording, forward and backward, in order of start.

    A call that recorded no device event (an attention on the CPU, or a recording of the host
    alone) comes with empty `parts`.
    """
    forwards = [*_fused_drafts(trace), *_eager_drafts(trace)]
    owner = {id(op): draft for draft in forwards for op, _ in draft.operators}
    backwards = _backward_drafts(trace, owner)
    owner.update({id(op): draft for draft in backwards for op, _ in draft.operators})
    taken: set[int] = set()
    for event in trace.device_events():
        found = _find_draft(event, owner)
        if found is not None:
            draft, op = found
            draft.parts.append(Part(_label(event, op, draft), event))
            taken.add(id(event))
    calls = {id(draft): draft.finish() for draft in forwards}
    finished = list(calls.values())
    finished.extend(draft.finish(calls[id(draft.forward)]) for draft in backwards)
    finished.extend(_calls_of_kernels(trace, taken, finished))
    finished.sort(key=lambda call: call.start_ns)
    return finished


@dataclass(eq=False)
class _Draft:
    """A call while its device events are gathered."""

    backend: str | None
    sizes: Sizes
    mask: MaskUse
    dropout: bool | None
    operators: list[tuple[HostOp, PartLabel]]
    forward: _Draft | None = None
    parts: list[Part] = field(default_factory=list)

    def finish(self, forward: AttentionCall | None = None) -> AttentionCall:
        first = self.operators[0][0]
        end_ns = max(op.end_ns for op, _ in self.operators)
        start_ns = min(op.start_ns for op, _ in self.operators)
        parts = _label_products(self.parts) if self.backend == "math" else self.parts
        sizes, mask = self.sizes, self.mask
        if self.forward is None:
            sizes, mask = _complete_from_kernels(sizes, mask, parts)
        return AttentionCall(
            backend=_backend(self.backend, parts),
            pass_="forward" if self.forward is None else "backward",
            sizes=sizes if forward is None else forward.sizes,
            mask=mask if forward is None else forward.mask,
            parts=tuple(parts),
            dropout=self.dropout,
            op=first,
            forward=forward,
            recomputed=forward is None and any(op.is_backward for op in first.ancestors()),
            host_start_ns=start_ns,
            host_ns=end_ns - start_ns,
            module_path=forward.module_path if forward else first.module_path(),
            annotations=forward.annotations if forward else first.annotations(),
        )


def _fused_drafts(trace: Trace) -> list[_Draft]:
    """One draft for each outermost operator that is an attention by itself."""
    drafts: list[_Draft] = []
    inside: dict[int, tuple[int, _Draft]] = {}  # thread -> end of the open operator, its draft
    for op in trace.host_ops:
        if op.kind != "operator":
            continue
        end_ns, draft = inside.get(op.thread, (-1, None))
        if draft is not None and op.start_ns < end_ns:
            # the operators inside tell which backend was chosen, and repeat the arguments
            if draft.backend is None:
                draft.backend = backend_of_operator(op.name)
            continue
        if not is_attention_operator(op.name) or op.is_backward:
            continue
        draft = _Draft(
            backend=backend_of_operator(op.name),
            sizes=read_sizes(op),
            mask=read_mask(op),
            dropout=read_dropout(op),
            operators=[(op, "attention")],
        )
        inside[op.thread] = (op.end_ns, draft)
        drafts.append(draft)
    return drafts


def _eager_drafts(trace: Trace) -> list[_Draft]:
    outside = _outside_of_attention(trace)
    return [_eager_draft(found) for found in find_eager_attention(outside)]


def _outside_of_attention(trace: Trace) -> list[HostOp]:
    kept, until = [], dict[int, int]()
    for op in trace.host_ops:
        if op.kind == "operator" and op.start_ns < until.get(op.thread, -1):
            continue
        if op.kind == "operator" and is_attention_operator(op.name):
            until[op.thread] = op.end_ns
            continue
        kept.append(op)
    return kept


def _eager_draft(found: EagerAttention) -> _Draft:
    return _Draft(
        backend="eager",
        sizes=found.sizes,
        mask=found.mask,
        dropout=found.dropout,
        operators=found.operators,
    )


def _backward_drafts(trace: Trace, owner: dict[int, _Draft]) -> list[_Draft]:
    """One draft for each forward call whose autograd nodes ran."""
    drafts: dict[int, _Draft] = {}
    until: dict[int, int] = {}
    for node in trace.host_ops:
        if node.forward is None or not node.is_backward:
            continue
        if node.start_ns < until.get(node.thread, -1):
            continue
        made_by: HostOp | None = node.forward
        while made_by is not None and id(made_by) not in owner:
            made_by = made_by.parent
        if made_by is None:
            continue
        until[node.thread] = node.end_ns
        forward = owner[id(made_by)]
        draft = drafts.setdefault(
            id(forward),
            _Draft(
                forward.backend, forward.sizes, forward.mask, forward.dropout, [], forward=forward
            ),
        )
        label = next(label for op, label in forward.operators if op is made_by)
        draft.operators.append((node, label))
    return list(drafts.values())


def _find_draft(event: DeviceEvent, owner: dict[int, _Draft]) -> tuple[_Draft, HostOp] | None:
    """The call that an event belongs to, and the call's operator around it."""
    op, recorded_for_autograd = event.op, False
    while op is not None:
        draft = owner.get(id(op))
        if draft is not None:
            # work that itself records gradients inside of a backward node is a forward that runs
            # again there (checkpointing), and not the node's own
            again = draft.forward is not None and recorded_for_autograd
            return None if again else (draft, op)
        if op.sequence is not None and not op.is_backward and op.kind == "operator":
            recorded_for_autograd = True
        op = op.parent
    return None


def _label(event: DeviceEvent, op: HostOp, draft: _Draft) -> PartLabel:
    label: PartLabel = next(label for known, label in draft.operators if known is op)
    name = decode(event.name)
    if isinstance(event, Copy) and event.kind == "memset":
        return "helper"
    if label in ("scores", "values") and name.role != "matmul":
        return "copy" if name.role == "copy" else "other"
    if label != "attention":
        return label
    if name.role in ("attention_forward", "attention_backward"):
        return "attention"
    if name.role == "attention_part":
        return "helper"
    if name.role == "matmul":
        return "other"  # `_label_products` tells which
    return _label_inside(event, op) or ("copy" if name.role == "copy" else "other")


def _label_inside(event: DeviceEvent, op: HostOp) -> PartLabel | None:
    """What the operators between an attention's operator and the event say, the outermost first."""
    around: list[HostOp] = []
    inner = event.op
    while inner is not None:
        around.append(inner)
        if inner is op:
            break
        inner = inner.parent
    for step in reversed(around):
        label = label_of_step(step.name)
        if label is not None:
            return label
    return None


def _label_products(parts: list[Part]) -> list[Part]:
    """Products of PyTorch's math attention: the first half makes scores (backward: values)."""
    softmax = next(
        (i for i, part in enumerate(parts) if decode(part.event.name).role == "softmax"), None
    )
    if softmax is None:
        return parts
    backward = decode(parts[softmax].event.name).pass_ == "backward"
    labelled = []
    for i, part in enumerate(parts):
        if decode(part.event.name).role == "matmul":
            label: PartLabel = "scores" if (i < softmax) != backward else "values"
            labelled.append(replace(part, label=label))
        else:
            labelled.append(part)
    return labelled


def _backend(from_operators: str | None, parts: list[Part]) -> str:
    """What the operators chose; else the backend of the kernels that did the work."""
    if from_operators is not None:
        return from_operators
    votes: Counter[str] = Counter()
    for part in parts:
        name = decode(part.event.name)
        if name.is_attention and name.backend is not None:
            votes[name.backend] += 1
    return votes.most_common(1)[0][0] if votes else "unknown"


def _complete_from_kernels(sizes: Sizes, mask: MaskUse, parts: list[Part]) -> tuple[Sizes, MaskUse]:
    """Fill what the operators left open with what the main kernel's name says."""
    for part in parts:
        name = decode(part.event.name)
        if name.role not in ("attention_forward", "attention_backward"):
            continue
        if sizes.dtype is None and name.dtype is not None:
            sizes = replace(sizes, dtype=name.dtype)
        if mask.kind == "unknown" and name.causal is not None:
            # a kernel without the causal flag may still have a window, so "none" is not certain
            mask = MaskUse("causal", "bottom-right") if name.causal else mask
    return sizes, mask


def _calls_of_kernels(
    trace: Trace, taken: set[int], known: list[AttentionCall]
) -> list[AttentionCall]:
    """Attention among the kernels that no call has yet."""
    left = [kernel for kernel in trace.kernels if id(kernel) not in taken]
    groups = fused_groups(left)
    grouped = {id(kernel) for group in groups for kernel, _ in group.kernels}
    bare = [kernel for kernel in left if id(kernel) not in grouped]
    without_backward = _without_backward(known)
    calls = []
    for group in groups:
        backend = group.name.backend or "unknown"
        forward = _forward_of(group, backend, without_backward) if group.backward else None
        calls.append(_call_of_group(group, backend, forward))
    calls.extend(_call_of_group(group, "eager", None) for group in eager_groups(bare))
    return calls


def _without_backward(known: list[AttentionCall]) -> dict[int, list[AttentionCall]]:
    """Forward calls without a backward yet, by each operator around them."""
    done = {id(call.forward) for call in known if call.forward is not None}
    found: dict[int, list[AttentionCall]] = {}
    for call in known:
        if call.pass_ == "forward" and id(call) not in done and call.op is not None:
            for outer in call.op.ancestors():
                found.setdefault(id(outer), []).append(call)
    return found


def _forward_of(
    group: KernelGroup, backend: str, without_backward: dict[int, list[AttentionCall]]
) -> AttentionCall | None:
    """The forward call inside the operator whose autograd node runs the group.

    A compiled region is one operator and one node for many calls; their backward comes in reverse
    order.
    """
    op = group.kernels[0][0].op
    while op is not None and (op.forward is None or not op.is_backward):
        op = op.parent
    candidates = without_backward.get(id(op.forward), []) if op is not None else []
    match = next((c for c in reversed(candidates) if c.backend == backend), None)
    if match is not None:
        candidates.remove(match)
    return match


def _call_of_group(
    group: KernelGroup, backend: str, forward: AttentionCall | None
) -> AttentionCall:
    kernels: list[tuple[Kernel, PartLabel]] = sorted(
        group.kernels, key=lambda pair: pair[0].start_ns
    )
    parts = [Part(label, kernel) for kernel, label in kernels]
    around = next((k.op for k, label in kernels if label == "attention"), kernels[0][0].op)
    # a range or a Python frame says where the call stands, and not what the call cost the host
    op = around if around is not None and around.kind == "operator" else None
    if forward is not None:
        sizes, mask = forward.sizes, forward.mask
    elif backend == "eager":
        sizes, mask = Sizes(dtype=group.name.dtype), MaskUse()
    else:
        known = op is not None and backend_of_operator(op.name) is not None
        sizes = read_sizes(op) if op is not None and known else Sizes()
        sizes, mask = _complete_from_kernels(sizes, MaskUse(), parts)
    if forward is not None:
        module_path, annotations = forward.module_path, forward.annotations
    elif around is not None:
        module_path, annotations = around.module_path(), around.annotations()
    else:
        module_path, annotations = (), ()
    return AttentionCall(
        backend=backend,
        pass_="backward" if group.backward else "forward",
        sizes=sizes,
        mask=mask,
        parts=tuple(parts),
        dropout=forward.dropout if forward is not None else None,
        op=op,
        forward=forward,
        recomputed=not group.backward
        and around is not None
        and any(outer.is_backward for outer in around.ancestors()),
        host_start_ns=op.start_ns if op is not None else None,
        host_ns=op.duration_ns if op is not None else None,
        module_path=module_path,
        annotations=annotations,
    )
