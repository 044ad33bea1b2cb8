"""The problems of the source articles, with the figures that they publish."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashdig.problem import AttentionProblem

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
STEPS_SEQLEN = 4096


@dataclass(frozen=True)
class Published:
    """A figure of an article for one rung: what it is and on which chip."""

    ms: float | None = None
    forward_backward_tflops: float | None = None
    chip: str = ""


@dataclass(frozen=True)
class Cell:
    """One problem of a preset.

    Attributes:
        tf32: float32 products may use TF32; without, they are IEEE.
        published: rung -> the article's figure.
        steps: also take the way from v1 to v2 step by step.
    """

    problem: AttentionProblem
    tf32: bool = False
    published: dict[str, Published] = field(default_factory=dict)
    steps: bool = False

    @property
    def precision(self) -> str:
        """The dtype as the matmul rates name it: "tf32" for float32 with TF32."""
        return "tf32" if self.tf32 else self.problem.dtype


@dataclass(frozen=True)
class Preset:
    """A named set of cells.

    Attributes:
        forward_backward: also time forward plus backward where a rung has a backward.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    forward_backward: bool = False


# FlashAttention-2's repository, figure flash2_a100_fwd_bwd_benchmark (A100 80 GB SXM4), forward
# plus backward, TFLOP/s, 16,384 tokens, hidden size 2048; None where its bar is missing
A100_FORWARD_BACKWARD = {
    (64, False): (132, 153, 162, 171, 175, 176),
    (128, False): (None, 173, 187, 196, 201, 203),
    (64, True): (88, 119, 140, 156, 165, 171),
    (128, True): (99, 133, 155, 173, 182, 189),
}


def _fa2_paper_cells() -> tuple[Cell, ...]:
    cells = []
    for (head_dim, causal), series in A100_FORWARD_BACKWARD.items():
        for seqlen, tflops in zip(SEQLENS, series, strict=True):
            problem = AttentionProblem.dense(
                16384 // seqlen, 2048 // head_dim, seqlen, head_dim, "float16", causal=causal
            )
            published = {}
            if tflops is not None:
                published["sdpa_flash"] = Published(
                    forward_backward_tflops=float(tflops), chip="A100 80 GB"
                )
            cells.append(Cell(problem, published=published, steps=seqlen == STEPS_SEQLEN))
    return tuple(cells)


def _archaeology_cells() -> tuple[Cell, ...]:
    turing = {
        "v1": Published(ms=166.47, chip="a Turing card"),
        "v2": Published(ms=156.44, chip="a Turing card"),
        "v2_transposed": Published(ms=34.0, chip="a Turing card"),
    }
    problem = AttentionProblem.dense(10, 64, 1024, 64, "float32")
    return (
        Cell(problem, published=turing, steps=True),
        Cell(problem, tf32=True),
        Cell(problem.replace(dtype="float16"), steps=True),
        Cell(problem.replace(dtype="bfloat16")),
    )


def _cutlass_cells() -> tuple[Cell, ...]:
    chip = "the article's 24 GB card"
    published = {"naive": Published(ms=120.0, chip=chip), "v2": Published(ms=35.0, chip=chip)}
    problem = AttentionProblem.dense(8, 16, 4096, 64, "float16")
    return (Cell(problem, published=published), Cell(problem.replace(dtype="float32")))


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "archaeology",
            "the Triton archaeology article: batch 10, heads 64, seqlen 1024, head_dim 64",
            _archaeology_cells(),
        ),
        Preset(
            "cutlass-article",
            "the CUTLASS article: batch 8, heads 16, seqlen 4096, head_dim 64",
            _cutlass_cells(),
        ),
        Preset(
            "fa2-paper",
            "FlashAttention-2's grid: 16,384 tokens, hidden size 2048",
            _fa2_paper_cells(),
            forward_backward=True,
        ),
        Preset(
            "profiling-article",
            "the profiling article: causal bfloat16, batch 4, heads 16, seqlen 2048, head_dim 64",
            (
                Cell(
                    AttentionProblem.dense(4, 16, 2048, 64, "bfloat16", causal=True),
                    published={"sdpa_cudnn": Published(ms=0.1863, chip="A100 80 GB")},
                ),
            ),
        ),
    )
}
