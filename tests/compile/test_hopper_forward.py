"""The Hopper forward compiled without a GPU: no spills, products that overlap, its instructions.

One kernel with a column block and one with two, of packed input; those with the most accumulators.
"""

import pytest
import triton

from flashdig.evidence.offline import Request, compile_exhibits
from flashdig.evidence.ptxas import run_ptxas
from flashdig.evidence.sass import innermost_loops, parse_sass
from flashdig.kernels.hopper.tiles import tile_of
from flashdig.problem import AttentionProblem, Mask
from flashdig.readers.kernel_names import decode

PLAIN = AttentionProblem.dense(2, 4, 1024, 64, num_heads_kv=2)
LONG = PLAIN.replace(seqlen_q=8192, seqlen_k=8192, mask=Mask(window_right=0))
WANTED = [PLAIN, PLAIN.replace(head_dim=192, head_dim_v=192, packed=True), LONG]
# bytes of stores and loads: a few registers at a tile's beginning and end. Three consumers have 160
# a thread: enough for Triton 3.6 (timed on an H200), not for 3.9 (not timed)
SPILLED, SPILLED_BY_THREE = (64, 64) if triton.__version__.startswith("3.6.") else (96, 800)
INSTRUCTIONS = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "SYNCS")


@pytest.mark.newest
def test_no_spills_no_serialised_products_and_the_instructions_of_the_chip() -> None:
    requests = [Request("hopper:forward", problem, "sm_90") for problem in WANTED]
    for problem, (*before, kernel) in zip(WANTED, compile_exhibits(requests), strict=True):
        assert [one.name for one in before] == ["flashdig_clear_slack"] * problem.packed
        tile = tile_of(problem.head_dim, problem.head_dim_v, problem.seqlen_q, problem.causal)
        where = (kernel.name, kernel.registers, kernel.stack_bytes)
        assert kernel.spill_bytes <= (SPILLED_BY_THREE if tile.consumers == 3 else SPILLED), where
        assert (kernel.spill_bytes > 0) == (kernel.stack_bytes > 0), where
        assert kernel.threads == 128 * (tile.consumers + 1), where
        assert all(kernel.count(name) for name in INSTRUCTIONS), where
        report = run_ptxas(kernel.ptx, kernel.options)
        assert report.warnings == (), where
        name = decode(kernel.name)
        assert (name.family, name.role) == ("flashdig", "attention_forward"), where
        assert name.tile == (64 * tile.consumers, tile.block_n), where
        assert (name.dtype, name.head_dim) == ("bfloat16", problem.head_dim), where
        assert ("packed" in name.words) == problem.packed, where


def test_no_walk_of_wide_heads_spills() -> None:
    """A few registers that live over a whole tile of queries may; Triton 3.9's ptxas reads some."""
    allowed = 0 if triton.__version__.startswith("3.6.") else 8
    wide = [
        LONG.replace(head_dim=192, head_dim_v=128),
        LONG.replace(head_dim=256, head_dim_v=256),
    ]
    for (kernel,) in compile_exhibits([Request("hopper:forward", one, "sm_90") for one in wide]):
        walks = innermost_loops(parse_sass(kernel.listing), ("HGMMA",))
        assert len(walks) >= 2, kernel.name  # masked tiles and whole ones
        for walk in walks:
            spills = sum(one.base in ("STL", "LDL") for one in walk.instructions)
            assert spills <= allowed, kernel.name
