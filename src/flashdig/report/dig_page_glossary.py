"""The words of a dig's page, each explained once, and links to them from where they first stand."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markupsafe import Markup, escape


@dataclass(frozen=True)
class Term:
    """A word and what it means.

    Attributes:
        key: a part of its anchor.
        forms: other spellings under which it is met.
    """

    key: str
    word: str
    meaning: str
    forms: tuple[str, ...] = ()


class Glossary:
    """Links the first use of each term, in the order in which text is given to it."""

    def __init__(self, terms: tuple[Term, ...] | None = None) -> None:
        self._terms = TERMS if terms is None else terms
        self._by_form = {form: term for term in self._terms for form in (term.word, *term.forms)}
        forms = sorted(self._by_form, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w:-])(?:{'|'.join(map(re.escape, forms))})(?![\w-])")
        self._used: set[str] = set()

    def link(self, text: str) -> Markup:
        """Plain text as HTML; terms that were not met before become links to their meaning."""
        if isinstance(text, Markup):
            raise TypeError("only plain text is searched for terms, not Markup")
        parts: list[Markup] = []
        end = 0
        for match in self._pattern.finditer(text):
            term = self._by_form[match[0]]
            if term.key in self._used:
                continue
            self._used.add(term.key)
            parts.append(escape(text[end : match.start()]))
            parts.append(
                Markup('<a class="term" href="#term-{}">{}</a>').format(term.key, match[0])
            )
            end = match.end()
        return Markup("").join([*parts, escape(text[end:])])

    @property
    def used(self) -> list[Term]:
        """Terms that were linked, in alphabetical order."""
        found = [term for term in self._terms if term.key in self._used]
        return sorted(found, key=lambda term: term.word.lower())


TERMS = (
    Term(
        "rung",
        "rung",
        "One generation of attention as a small program; each stands on the one below it, and the "
        "ladder shows what each change is worth.",
        ("rungs",),
    ),
    Term(
        "sdpa",
        "SDPA",
        "torch.nn.functional.scaled_dot_product_attention, with its backends math, "
        "memory-efficient, flash and cuDNN: rungs whose names begin with sdpa_.",
        ("sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn"),
    ),
    Term(
        "gate",
        "gate",
        "The check that a result must pass before its time counts: its largest error against "
        "float64 is at most twice that of eager attention which rounds Q Kᵀ, P and O to the dtype.",
    ),
    Term(
        "float64",
        "float64",
        "The reference that every result is compared with: the same attention in double precision.",
    ),
    Term(
        "eager",
        "eager attention",
        "Attention as separate torch operations: product, scale, mask, softmax, product.",
        ("eager",),
    ),
    Term(
        "score-matrix",
        "score matrix",
        "Q Kᵀ: one number for each query and key of each head. It grows with the square of the "
        "sequence length, which is why fused attention never stores it.",
        ("score matrices", "the scores", "matrix in memory"),
    ),
    Term(
        "online-softmax",
        "online softmax",
        "Softmax in one pass: the largest score so far and the sum so far are corrected whenever a "
        "larger score comes, so that the whole row is never needed at once.",
    ),
    Term(
        "rescale",
        "rescale",
        "The factor exp(m_old - m_new) by which a sum or an output is corrected when the largest "
        "score of a row grows from m_old to m_new.",
        ("rescaled",),
    ),
    Term(
        "lse",
        "LSE",
        "Logarithm of the sum of the exponentials of a row's scores: one number a row, all that a "
        "backward needs of the softmax.",
        ("lse",),
    ),
    Term(
        "tile",
        "tile",
        "A block of rows of Q, K or V that fits into a chip's shared memory or registers.",
        ("tiles",),
    ),
    Term(
        "program",
        "programs",
        "One instance of a Triton kernel: a thread block, which one SM runs from its start to its "
        "end.",
        ("program", "blocks", "thread block"),
    ),
    Term("grid", "grid", "All programs of one launch.", ("grids",)),
    Term(
        "sm",
        "SM",
        "Streaming multiprocessor: one of the processors of a GPU (an H200 has 132).",
        ("SMs",),
    ),
    Term(
        "wave",
        "wave",
        "As many programs as fit on all SMs at once. The last wave is seldom full, and a grid of "
        "less than one wave leaves SMs idle.",
        ("waves",),
    ),
    Term("warp", "warp", "32 threads that run together.", ("warps",)),
    Term(
        "occupancy",
        "occupancy",
        "Warps that an SM holds of this kernel, over the most that it can hold. Registers, shared "
        "memory or a small grid limit it; kernels on tiles do well at 12.5 %.",
    ),
    Term(
        "registers",
        "registers",
        "Where a thread keeps its values; at most 255 of 4 bytes.",
        ("registers a thread",),
    ),
    Term(
        "spill",
        "spills",
        "Values that found no register and go through memory instead.",
        ("spilled", "spill"),
    ),
    Term(
        "shared",
        "shared memory",
        "A small fast memory of each SM that the threads of a block share.",
        ("shared-memory",),
    ),
    Term(
        "banks",
        "bank conflicts",
        "Shared memory has 32 banks; two threads of a warp that want different words of one bank "
        "wait for each other.",
        ("bank conflict",),
    ),
    Term(
        "l2",
        "L2 cache",
        "The cache between all SMs and memory. Bytes that are found there are issued again but not "
        "read from memory again.",
        ("the cache",),
    ),
    Term(
        "compulsory",
        "compulsory",
        "Bytes that nobody can avoid: each input read once, each output written once.",
        ("cannot be avoided",),
    ),
    Term(
        "issued",
        "issued",
        "Bytes that the load and store instructions of a kernel ask for, whether or not a cache "
        "has them.",
    ),
    Term(
        "counted",
        "counted",
        "Bytes of a run in Triton's interpreter, which adds up what each instruction asks for. The "
        "closed form of the issued bytes must equal it to the byte.",
    ),
    Term(
        "expected",
        "expected",
        "What the cost models guess with the rates that this chip is known to reach, at the clock "
        "that was observed.",
    ),
    Term(
        "floor",
        "floor",
        "The time that no run can beat: the highest roof at specified peaks and perfect overlap.",
    ),
    Term(
        "roof",
        "roof",
        "A limit by one resource: memory, shared memory, matrix products, exponentials. The lowest "
        "one holds a kernel back.",
        ("roofs", "Roofs"),
    ),
    Term(
        "surprise",
        "surprise",
        "A figure outside the stated tolerance of its guess. Its cause is named where a rule knows "
        "it; otherwise it says unexplained.",
        ("surprises", "surprised"),
    ),
    Term(
        "tolerance",
        "tolerance",
        "How far a figure may lie from its guess without being a surprise: 15 % for times and "
        "occupancy, nothing for counts.",
    ),
    Term(
        "tflops",
        "TFLOP/s",
        "10¹² floating-point operations a second. Counted are the two products, 4 x batch x heads "
        "x seqlen² x head_dim, half of it when causal; softmax is not.",
    ),
    Term(
        "matmul-rate",
        "matmul rate",
        "TFLOP/s of one large matrix product in this dtype, measured in the same run.",
        ("of matmul", "matmul"),
    ),
    Term(
        "copy-rate",
        "copy rate",
        "Bytes a second of one large copy, loads and stores added, measured in the same run.",
        ("of copy",),
    ),
    Term(
        "share-of-gain",
        "share of the gain",
        "The logarithm of a rung's speed-up over the rung below, over that of the whole way. "
        "Shares add up to 100 %; a rung that is slower than the one below has a negative one.",
        ("of the gain",),
    ),
    Term(
        "aa",
        "A/A spread",
        "Each round measures every rung twice; this is the median difference between the two, and "
        "how far a ratio can be trusted.",
    ),
    Term(
        "graph",
        "CUDA graph",
        "Launches recorded once and replayed, so that the time is the GPU's and not the host's.",
    ),
    Term(
        "causal",
        "causal",
        "Each query sees the keys up to its own position: about half of the scores.",
    ),
    Term(
        "tf32",
        "TF32",
        "float32 products on tensor cores with 10 bits of mantissa instead of 23.",
    ),
    Term(
        "tensor-cores",
        "tensor cores",
        "The units that multiply small matrices; mma.sync (HMMA) is their older instruction, wgmma "
        "(HGMMA) that of Hopper.",
        ("HMMA", "HGMMA"),
    ),
    Term("sass", "SASS", "The instructions that a GPU runs, as the assembler leaves them."),
    Term(
        "pipe",
        "pipe",
        "A unit of an SM that works on one kind of instruction: tensor cores, exp2, FMA units, "
        "shared memory, and the issue of instructions itself.",
        ("pipes",),
    ),
    Term(
        "exp2",
        "exp2",
        "2 to the power x, on the special function unit (MUFU.EX2): 16 results a clock on an SM.",
        ("MUFU.EX2",),
    ),
    Term("ffma", "FFMA", "A float32 multiply-add on the ordinary units.", ("FMA units",)),
    Term(
        "exchange",
        "BAR SHFL LDS LDSM STS",
        "Instructions of a kernel by which warps wait for each other and exchange values: "
        "barriers, shuffles, loads from shared memory (of matrices too) and stores to it.",
    ),
    Term(
        "interpreter",
        "interpreter",
        "Triton's: it runs a kernel on the CPU, slowly, and can count what it asks for.",
    ),
)
