"""AttentionCall: one attention that ran, whichever way it was made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flashdig.problem import DTYPE_BYTES, Alignment, AttentionProblem, Mask
from flashdig.readers.model import DeviceEvent, HostOp

MaskKind = Literal["none", "causal", "window", "tensor", "block", "unknown"]
PartLabel = Literal[
    "attention",
    "helper",
    "scores",
    "scale",
    "softcap",
    "mask",
    "softmax",
    "dropout",
    "values",
    "cast",
    "copy",
    "other",
]


@dataclass(frozen=True)
class Sizes:
    """Shape and dtype of an attention as far as the recording has them; None is unknown.

    For packed input `packed` is True, `seqlen_q` and `seqlen_k` are totals over the batch, and
    `batch` is None. `batch_times_heads` is known even where code flattens the two into one
    dimension and their split is not recorded.
    """

    batch: int | None = None
    num_heads: int | None = None
    num_heads_kv: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    dtype: str | None = None
    packed: bool = False
    batch_times_heads: int | None = None

    @property
    def split(self) -> tuple[int, int] | None:
        """Batch and query heads; (1, their product) where only that is known; else None."""
        if self.batch is not None and self.num_heads is not None:
            return self.batch, self.num_heads
        return None if self.batch_times_heads is None else (1, self.batch_times_heads)


@dataclass(frozen=True)
class MaskUse:
    """What hides keys from queries.

    `kind`: "none", "causal" (by an argument or the kernel's own flag), "window" (a window and not
    causal), "tensor" (a mask or bias is read; what it hides is not recorded), "block"
    (FlexAttention's block mask), "unknown". `alignment` says where the causal diagonal starts when
    the lengths differ. `window` is (left, right) as recorded, None for unlimited.
    """

    kind: MaskKind = "unknown"
    alignment: Alignment | None = None
    window: tuple[int | None, int | None] | None = None

    @property
    def causal(self) -> bool | None:
        """True or False where it is certain, else None."""
        if self.kind == "window" and self.window is not None:
            return self.window[1] == 0
        return {"causal": True, "none": False}.get(self.kind)


@dataclass(frozen=True, eq=False)
class Part:
    """A device event of a call and what it does there."""

    label: PartLabel
    event: DeviceEvent


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention, forward or backward.

    Attributes:
        backend: "flash", "efficient", "cudnn", "math" (the choices of PyTorch's SDPA), "eager"
            (made of parts by the model's own code), "flash_attention_2" to "_4",
            "flex_attention", "flashdig", or another name of `kernel_names`; "unknown" if the
            recording does not tell.
        pass_: "forward" or "backward".
        sizes, mask: what was computed.
        dropout: True or False where recorded, else None.
        parts: device events in order of start; empty for an attention on the CPU.
        op: host operator of the call (of a forward made of parts: its first product; of a
            backward: its first autograd node); None where only kernels are known, be it inside of
            an annotation or a Python frame.
        forward: of a backward call, the forward call it belongs to, if that was recorded.
        recomputed: True for a forward that ran again inside a backward pass (checkpointing).
        host_ns: host time of the call, from its first to its last operator; None where `op` is.
        module_path: modules around the call, outermost first; () where stacks were not recorded.
        annotations: names of the annotations around the call, outermost first.
    """

    backend: str
    pass_: Literal["forward", "backward"]
    sizes: Sizes
    mask: MaskUse
    parts: tuple[Part, ...]
    dropout: bool | None = None
    op: HostOp | None = field(default=None, repr=False)
    forward: AttentionCall | None = field(default=None, repr=False)
    recomputed: bool = False
    host_start_ns: int | None = None
    host_ns: int | None = None
    module_path: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()

    @property
    def events(self) -> tuple[DeviceEvent, ...]:
        """Kernels, copies and memsets of the call, in order of start."""
        return tuple(part.event for part in self.parts)

    @property
    def device_ns(self) -> int | None:
        """Sum of the durations of its device events; None where it has none."""
        return sum(part.event.duration_ns for part in self.parts) if self.parts else None

    @property
    def start_ns(self) -> int:
        """Start on the device, or on the host for a call without device events."""
        if self.parts:
            return self.parts[0].event.start_ns
        return self.host_start_ns or 0

    @property
    def is_decoding(self) -> bool:
        """True for one query per sequence against a longer cache."""
        return self.sizes.seqlen_q == 1 and (self.sizes.seqlen_k or 0) > 1

    def problem(self) -> AttentionProblem | None:
        """The call as an AttentionProblem for the cost models; None where a size is missing.

        A tensor or block mask counts as no mask: what it hides is not recorded. Where only the
        product of batch and heads is known, it counts as heads of one sequence: the same work.
        """
        s = self.sizes
        if (
            s.packed
            or s.split is None
            or s.seqlen_q is None
            or s.seqlen_k is None
            or s.head_dim is None
            or s.dtype not in DTYPE_BYTES
        ):
            return None
        batch, num_heads = s.split
        num_heads_kv = num_heads if s.num_heads_kv is None else s.num_heads_kv
        head_dim_v = s.head_dim if s.head_dim_v is None else s.head_dim_v
        smallest = min(batch, num_heads, s.seqlen_q, s.seqlen_k, head_dim_v)
        if smallest < 0 or s.head_dim < 1 or num_heads_kv < 1 or num_heads % num_heads_kv:
            return None  # damaged numbers
        causal = self.mask.causal and (self.mask.alignment or "bottom-right")
        return AttentionProblem(
            batch=batch,
            num_heads=num_heads,
            num_heads_kv=num_heads_kv,
            seqlen_q=s.seqlen_q,
            seqlen_k=s.seqlen_k,
            head_dim=s.head_dim,
            head_dim_v=head_dim_v,
            dtype=s.dtype,
            mask=Mask.from_arguments(causal or False, self.mask.window),
            dropout=bool(self.dropout),
        )

    def describe(self) -> str:
        """One line: backend, pass, sizes, mask."""
        s = self.sizes
        text = f"{self.backend} {self.pass_}"
        if s.seqlen_q is not None:
            length = f"{s.seqlen_q}" + (f"/{s.seqlen_k}" if s.seqlen_k != s.seqlen_q else "")
            text += f": {self._batch_and_heads()}, seqlen {length}, head_dim {s.head_dim}"
        if s.dtype is not None:
            text += f", {s.dtype}"
        words = {"causal": ", causal", "tensor": ", mask tensor", "block": ", block mask"}
        text += words.get(self.mask.kind, "")
        if self.mask.window is not None:
            left, right = ("all" if side is None else side for side in self.mask.window)
            text += f", window {left} to {right}"
        return text

    def _batch_and_heads(self) -> str:
        s = self.sizes
        if s.num_heads is None:
            return f"batch x heads {s.batch_times_heads}"
        heads = str(s.num_heads)
        if s.num_heads_kv not in (None, s.num_heads):
            heads += f"/{s.num_heads_kv}"
        return f"{'packed' if s.packed else f'batch {s.batch}'}, heads {heads}"
