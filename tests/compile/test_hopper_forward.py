"""The Hopper forward compiled without a GPU: no spills, products that overlap, its instructions.

One kernel of each kind of head_dim: one column block and two, three consumer warpgroups and two.
"""

import pytest

from flashdig.evidence.offline import Request, compile_exhibits
from flashdig.evidence.ptxas import run_ptxas
from flashdig.problem import AttentionProblem
from flashdig.readers.kernel_names import decode

PLAIN = AttentionProblem.dense(2, 4, 1024, 64, num_heads_kv=2)
# head_dim, head_dim_v, what else -> consumer warpgroups, tile
WANTED = [
    (PLAIN, 3, (192, 128)),
    (PLAIN.replace(head_dim=192, head_dim_v=192, packed=True), 2, (128, 64)),
]
INSTRUCTIONS = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "SYNCS")


@pytest.mark.newest
def test_no_spills_no_serialised_products_and_the_instructions_of_the_chip() -> None:
    requests = [Request("hopper:forward", problem, "sm_90") for problem, _, _ in WANTED]
    for (problem, consumers, tile), (*before, kernel) in zip(
        WANTED, compile_exhibits(requests), strict=True
    ):
        assert [one.name for one in before] == ["flashdig_clear_slack"] * problem.packed
        where = (kernel.name, kernel.registers, kernel.stack_bytes)
        assert kernel.spill_bytes == kernel.stack_bytes == 0, where
        assert kernel.threads == 128 * (consumers + 1), where
        assert all(kernel.count(name) for name in INSTRUCTIONS), where
        report = run_ptxas(kernel.ptx, kernel.options)
        assert report.warnings == (), where
        name = decode(kernel.name)
        assert (name.family, name.role, name.tile) == ("flashdig", "attention_forward", tile)
        assert (name.dtype, name.head_dim) == ("bfloat16", problem.head_dim), where
        assert ("packed" in name.words) == problem.packed, where
