"""What the conformance suite asks of the kernels: features, and inputs for each combination.

A specialisation is one combination of what kernels are compiled for; together they cover every
pair of features. Its cases differ in lengths, values and strides, for which nothing is compiled.
All plain numbers, drawn from a seed: the same suite on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from flashdig.bench.pairwise import Combination, covering_array
from flashdig.problem import Mask

DTYPES = ("float16", "bfloat16", "float32", "tf32")
# (head_dim, head_dim_v)
HEAD_DIMS = (
    (8, 8),
    (16, 16),
    (40, 40),
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 192),
    (256, 256),
    (63, 63),
    (24, 50),
    (192, 128),
    (64, 256),
)
# (num_heads, num_heads_kv)
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}
MASKS = (
    "full",
    "causal",
    "top-left",
    "window left",
    "window right",
    "window both",
    "causal window",
    "top-left window",
)
# which dimensions a bias is broadcast in; "bool" hides
BIASES = ("none", "full", "b", "h", "q", "k", "bhq", "bool", "bool bh")
# names of the inputs that take gradients; bias and sinks take theirs where they are there
WANTED = ("all", "q", "k", "v", "kv", "terms")

FEATURES: dict[str, tuple[Hashable, ...]] = {
    "dtype": DTYPES,
    "head_dims": HEAD_DIMS,
    "heads": tuple(HEADS),
    "mask": MASKS,
    "softcap": (False, True),
    "alibi": ("none", "h", "bh"),
    "bias": BIASES,
    "sinks": (False, True),
    "dropout": (False, True),
    "layout": ("dense", "packed", "packed seqused"),
    "lse_gradient": (False, True),
    "wanted": WANTED,
    "aligned": (True, False),
}
# what `dispatch` gives to the Hopper kernels
HOPPER_FEATURES: dict[str, tuple[Hashable, ...]] = {
    **FEATURES,
    "dtype": ("float16", "bfloat16"),
    "head_dims": tuple(pair for pair in HEAD_DIMS if all(size % 8 == 0 for size in pair)),
    "bias": ("none",),
    "dropout": (False,),
    # "terms" alone would be the sinks' gradient, which "all" has too
    "wanted": tuple(wanted for wanted in WANTED if wanted != "terms"),
    # a backward of its own
    "deterministic": (False, True),
}

DISTRIBUTIONS = ("gaussian", "constant", "rising", "huge key", "large logits", "zero")
STORAGES = ("contiguous", "transposed", "sliced rows", "sliced heads", "expanded")
# around the tiles' 64 and 128; more queries, more keys, one of each
LENGTHS = (
    (65, 63),
    (1, 1),
    (129, 127),
    (33, 211),
    (1, 300),
    (211, 33),
    (63, 65),
    (64, 64),
    (257, 129),
    (300, 1),
    (127, 257),
    (128, 128),
    (31, 32),
    (97, 390),
    (5, 0),
)
LONG_LENGTHS = ((2049, 515), (190, 2100))
TINY_LENGTHS = ((17, 19), (1, 1), (9, 33), (33, 9), (1, 20), (20, 1), (32, 32), (31, 33), (5, 0))


def features_may_meet(chosen: Mapping[str, Hashable]) -> bool:
    """Packed input refuses a bias; and a backward must have a gradient to make."""
    bias, layout = chosen.get("bias", "none"), chosen.get("layout", "dense")
    if bias != "none" and layout != "dense":
        return False
    if chosen.get("wanted") == "terms":
        float_bias = bias != "none" and not str(bias).startswith("bool")
        bias_may_come = "bias" not in chosen and layout == "dense"
        return float_bias or bias_may_come or chosen.get("sinks", True) is True
    return True


def head_dims_of(features: Mapping[str, Any]) -> tuple[int, int]:
    """(head_dim, head_dim_v)."""
    head_dim, head_dim_v = features["head_dims"]
    return head_dim, head_dim_v


def specialisations(features: Mapping[str, Any] | None = None) -> list[Combination]:
    """Combinations that cover every pair of features."""
    return covering_array(features or FEATURES, features_may_meet)


@dataclass(frozen=True)
class Case:
    """One call, forward and backward.

    Attributes:
        number: of the specialisation, and of the input to it.
        features: the specialisation.
        lengths: (seqlen_q, seqlen_k) of each sequence; dense sequences share one.
        seqused: rows in use of each sequence, (queries, keys), or None.
        slack: rows (before the first, after the last sequence) of packed tensors.
        distribution, storage, grad_storage: see `conformance_inputs`.
        mask: as the kernels take it.
        hidden_nan: what no query sees holds NaN.
        softmax_scale, dropout_p, softcap: numbers of the call.
        seed: of the values.
        sampled: also run twice, and for packed input compared with dense calls.
    """

    number: tuple[int, int]
    features: Combination
    lengths: tuple[tuple[int, int], ...]
    seqused: tuple[tuple[int, int], ...] | None
    slack: tuple[int, int]
    distribution: str
    storage: str
    grad_storage: str
    mask: Mask
    hidden_nan: bool
    softmax_scale: float
    dropout_p: float
    softcap: float
    seed: int
    sampled: bool

    @property
    def packed(self) -> bool:
        return self.features["layout"] != "dense"

    @property
    def own_grad_rows(self) -> bool:
        """Each row of dout has memory of its own."""
        return self.grad_storage not in ("expanded", "of a sum")

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def used(self, sequence: int) -> tuple[int, int]:
        """(queries, keys) of a sequence that count."""
        if self.seqused is None:
            return self.lengths[sequence]
        (q, k), (used_q, used_k) = self.lengths[sequence], self.seqused[sequence]
        return min(q, used_q), min(k, used_k)

    def describe(self) -> str:
        """Everything that the case is, on one line."""
        features = " ".join(f"{name}={value}" for name, value in self.features.items())
        return (
            f"{self.number[0]}.{self.number[1]} {features}: lengths={self.lengths} "
            f"seqused={self.seqused} slack={self.slack} {self.distribution}, {self.storage}, "
            f"dout {self.grad_storage}, window=({self.mask.window_left}, "
            f"{self.mask.window_right}) {self.mask.alignment} scale={self.softmax_scale:.4g} "
            f"dropout={self.dropout_p} softcap={self.softcap} nan={self.hidden_nan} "
            f"seed={self.seed}"
        )


def draw_case(
    features: Combination, number: tuple[int, int], seed: int, *, tiny: bool = False
) -> Case:
    """Input `number[1]` of specialisation `number[0]`; `tiny` keeps lengths below 34."""
    spec, index = number
    draw = random.Random(f"{seed} {spec} {index}")
    lengths = _lengths(features, spec + index, draw, tiny)
    seqused = None
    if features["layout"] == "packed seqused":  # none, some, all and more than all
        seqused = tuple(
            (draw.choice((q, q // 2, q + 3, 0)), draw.choice((k, k // 2 + 1, k + 5, 0)))
            for q, k in lengths
        )
    slack = (0, 0)
    if features["layout"] != "dense":
        slack = draw.choice(((0, 0), (0, 9), (3, 0), (5, 130))) if not tiny else (3, 9)
    distribution = DISTRIBUTIONS[(spec + index) % len(DISTRIBUTIONS)]
    if tiny and features["dtype"] == "float32" and distribution in ("huge key", "large logits"):
        # at scores above 100 gradients were seen to lose 3 to 14 times what eager attention loses
        # in the interpreter; cause open (it fuses no multiply-add). A GPU is held to the rule
        distribution = "gaussian"
    storage = STORAGES[(spec + index // 2) % len(STORAGES)]
    head_dim, head_dim_v = head_dims_of(features)
    # a sum's gradient has no strides: the copy of it keeps the specialisation only where it fits
    grad_storages: tuple[str, ...] = STORAGES
    if features["aligned"] and head_dim_v % 8 == 0:
        grad_storages = (*STORAGES, "of a sum")
    grad_storage = grad_storages[(spec + index + 2) % len(grad_storages)]
    dropout_p = 0.0
    if features["dropout"]:
        dropout_p = 1.0 if index % 12 == 11 else draw.choice((0.1, 0.3, 0.9))
    return Case(
        number=number,
        features=features,
        lengths=lengths,
        seqused=seqused,
        slack=slack,
        distribution=distribution,
        storage=storage,
        grad_storage=grad_storage,
        mask=_mask(str(features["mask"]), draw),
        # one memory under several heads cannot be hidden from one of them
        hidden_nan=storage != "expanded",
        softmax_scale=head_dim**-0.5 * (1.7 if index % 5 == 4 else 1.0),
        dropout_p=dropout_p,
        softcap=draw.choice((2.0, 15.0)) if features["softcap"] else 0.0,
        seed=draw.getrandbits(62),
        sampled=(spec + index) % (16 if tiny else 8) == 0,
    )


def _lengths(
    features: Combination, turn: int, draw: random.Random, tiny: bool
) -> tuple[tuple[int, int], ...]:
    choices = TINY_LENGTHS if tiny else LENGTHS
    if features["layout"] == "dense":
        if not tiny and turn % 40 == 0:
            return (draw.choice(LONG_LENGTHS),)
        return (choices[turn % len(choices)],) * draw.choice((1, 1, 2) if tiny else (1, 2, 3))
    count = 3 if tiny else draw.choice((3, 4, 5))
    lengths = [choices[(turn + 4 * n) % len(choices)] for n in range(count)]
    lengths[draw.randrange(count)] = draw.choice(((0, 0), (0, 7), (7, 0)))  # zero segments
    return tuple(lengths)


def _mask(name: str, draw: random.Random) -> Mask:
    left, right = draw.choice((0, 5, 63, 64, 100)), draw.choice((0, 3, 40, 64))
    causal, window = {
        "full": (False, None),
        "causal": (True, None),
        "top-left": ("top-left", None),
        "window left": (False, (left, None)),
        "window right": (False, (None, right)),
        "window both": (False, (left, right)),
        "causal window": (True, (left, None)),
        "top-left window": ("top-left", (left, None)),
    }[name]
    return Mask.from_arguments(causal, window)  # type: ignore[arg-type]
