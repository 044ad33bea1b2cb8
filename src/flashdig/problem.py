"""AttentionProblem: one attention problem as plain numbers, without tensors, torch or a GPU.

It is what the cost models predict, what `dispatch` chooses a backend for, and the key by which
compiled things are kept. Masks are ranges of key positions per query row; every module takes them
from here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, get_args

Alignment = Literal["bottom-right", "top-left"]
Causal = bool | Literal["bottom-right", "top-left"]
Slopes = Literal["none", "heads", "batch_heads"]
Bias = Literal["none", "float", "bool"]
SLOPES: tuple[str, ...] = get_args(Slopes)
BIASES: tuple[str, ...] = get_args(Bias)

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True)
class Mask:
    """Which keys a query row may see by its position alone.

    Row i sees key j when i + offset - left <= j <= i + offset + right (inclusive; None is
    unlimited), where offset is seqlen_k - seqlen_q for "bottom-right" and 0 for "top-left". Causal
    attention is right = 0.
    """

    window_left: int | None = None
    window_right: int | None = None
    alignment: Alignment = "bottom-right"

    @classmethod
    def from_arguments(
        cls, causal: Causal = False, window: tuple[int | None, int | None] | None = None
    ) -> Mask:
        """The mask that the public arguments `causal` and `window` ask for.

        Raises ValueError or TypeError, naming the argument, for values outside the contract.
        """
        if causal not in (False, True, "bottom-right", "top-left"):
            raise ValueError(
                f"causal must be False, True, 'bottom-right' or 'top-left', got {causal!r}"
            )
        if window is None:
            window = (None, None)
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise TypeError(f"window must be None or a pair (left, right), got {window!r}")
        left, right = (_window_side(side, window) for side in window)
        if causal:
            right = 0
        return cls(left, right, "top-left" if causal == "top-left" else "bottom-right")

    @property
    def is_causal(self) -> bool:
        return self.window_right == 0

    @property
    def is_full(self) -> bool:
        """True when nothing is hidden, whatever the lengths."""
        return self.window_left is None and self.window_right is None

    @property
    def sides(self) -> tuple[int, int]:
        """(left, right) in numbers only, as launchers take them: -1 is unlimited."""
        left, right = self.window_left, self.window_right
        return (-1 if left is None else left, -1 if right is None else right)

    def offset(self, seqlen_q: int, seqlen_k: int) -> int:
        """Key position that lies on the diagonal of query row 0."""
        return 0 if self.alignment == "top-left" else seqlen_k - seqlen_q

    def key_range(self, row: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Half-open range of the keys that query `row` sees; empty ranges come back as (n, n)."""
        return self.tile_key_range(row, row + 1, seqlen_q, seqlen_k)

    def tile_key_range(
        self, first_row: int, end_row: int, seqlen_q: int, seqlen_k: int
    ) -> tuple[int, int]:
        """Half-open range of keys that some row of [first_row, end_row) sees."""
        diagonal = self.offset(seqlen_q, seqlen_k)
        begin, end = 0, seqlen_k
        if self.window_left is not None:
            begin = max(0, first_row + diagonal - self.window_left)
        if self.window_right is not None:
            end = min(seqlen_k, end_row - 1 + diagonal + self.window_right + 1)
        begin = min(begin, seqlen_k)
        return begin, max(begin, end)

    def visible_pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """Number of (query, key) pairs that are computed, for one head of one sequence."""
        if self.is_full:
            return seqlen_q * seqlen_k
        diagonal = self.offset(seqlen_q, seqlen_k)
        total = seqlen_q * seqlen_k
        if self.window_right is not None:
            # keys past the right edge: a triangle, clipped to the rectangle
            total -= _pairs_beyond(seqlen_q, seqlen_k, diagonal + self.window_right)
        if self.window_left is not None:
            # keys before the left edge: the same triangle, mirrored in rows and keys
            mirrored = seqlen_k - seqlen_q - diagonal + self.window_left
            total -= _pairs_beyond(seqlen_q, seqlen_k, mirrored)
        return total


def _window_side(side: int | None, window: object) -> int | None:
    if side is None:
        return None
    if isinstance(side, bool) or not isinstance(side, int):
        raise TypeError(f"window must hold integers or None, got {window!r}")
    if side < -1:
        raise ValueError(f"window sides must be >= 0, or None or -1 for unlimited, got {window!r}")
    return None if side == -1 else side


def _pairs_beyond(rows: int, keys: int, last: int) -> int:
    """Pairs (i, j) of a rows x keys rectangle with j > i + last."""
    # Row i hides clamp(keys - 1 - last - i, 0, keys) keys: a full stretch, then a falling one, then
    # nothing.
    first_hidden = keys - 1 - last
    full = min(max(first_hidden - keys, 0), rows)
    end = min(max(first_hidden, 0), rows)
    falling = end - full
    return full * keys + falling * (first_hidden - full) - falling * (falling - 1) // 2


@dataclass(frozen=True)
class AttentionProblem:
    """Shapes, dtype and features of one attention problem; hashable, and equal when a kernel could
    be shared.

    Lengths are the dense ones, or for packed input (`packed=True`) the longest ones with `batch`
    sequences.
    """

    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    # a factory: torch.compile cannot trace a default that is an object of ours (torch 2.11)
    mask: Mask = field(default_factory=Mask)
    softcap: float = 0.0
    dropout: bool = False
    alibi: Slopes = "none"
    bias: Bias = "none"
    sinks: bool = False
    packed: bool = False
    deterministic: bool = False
    allow_tf32: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "num_heads", "seqlen_q", "seqlen_k", "head_dim_v"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.head_dim < 1:
            raise ValueError(f"head_dim must be >= 1, got {self.head_dim}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        for name, kinds in (("alibi", SLOPES), ("bias", BIASES)):
            if getattr(self, name) not in kinds:
                raise ValueError(
                    f"{name} must be one of {', '.join(kinds)}, got {getattr(self, name)!r}"
                )
        if self.num_heads_kv < 1 and self.num_heads > 0:
            raise ValueError(f"num_heads_kv must be >= 1, got {self.num_heads_kv}")
        if self.num_heads_kv and self.num_heads % self.num_heads_kv:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_heads_kv ({self.num_heads_kv})"
            )

    @classmethod
    def dense(
        cls,
        batch: int,
        num_heads: int,
        seqlen: int,
        head_dim: int,
        dtype: str = "bfloat16",
        *,
        causal: Causal = False,
        num_heads_kv: int | None = None,
        seqlen_k: int | None = None,
    ) -> AttentionProblem:
        """A self-attention problem in the fewest words."""
        return cls(
            batch=batch,
            num_heads=num_heads,
            num_heads_kv=num_heads if num_heads_kv is None else num_heads_kv,
            seqlen_q=seqlen,
            seqlen_k=seqlen if seqlen_k is None else seqlen_k,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=dtype,
            mask=Mask.from_arguments(causal),
        )

    @property
    def causal(self) -> bool:
        return self.mask.is_causal

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_heads_kv if self.num_heads_kv else 1

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def softmax_scale(self) -> float:
        """The default scale: the true head_dim to the power -0.5."""
        return float(self.head_dim**-0.5)

    @property
    def visible_pairs(self) -> int:
        """Pairs (query, key) over the whole problem, all batches and heads."""
        return self.batch * self.num_heads * self.mask.visible_pairs(self.seqlen_q, self.seqlen_k)

    def replace(self, **changes: object) -> AttentionProblem:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def describe(self) -> str:
        """One line for people: sizes first, then what is not the default."""
        heads = str(self.num_heads)
        if self.num_heads_kv != self.num_heads:
            heads += f"/{self.num_heads_kv}"
        seqlen = str(self.seqlen_q)
        if self.seqlen_k != self.seqlen_q:
            seqlen += f"/{self.seqlen_k}"
        head_dim = str(self.head_dim)
        if self.head_dim_v != self.head_dim:
            head_dim += f"/{self.head_dim_v}"
        text = f"batch {self.batch}, heads {heads}, seqlen {seqlen}, head_dim {head_dim}"
        text += f", {self.dtype}"
        return text + (", causal" if self.causal else "")
