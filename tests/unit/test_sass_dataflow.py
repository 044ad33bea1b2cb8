"""Where values flow in machine code: products of Q K^T and P V, addresses in lanes, bank conflicts.

Listings beside those of test_sass.py: fp32, head_dim 64, full attention, by Triton 3.6.0.
"""

import dataclasses
from pathlib import Path

import pytest

from flashdig.bench.results import read_record
from flashdig.costs.schedules import exhibit_tile
from flashdig.costs.shared_memory import fma_wavefronts
from flashdig.evidence.bank_conflicts import LoopBanks, loop_banks, loop_conflicts
from flashdig.evidence.gemms import Gemms, sort_products
from flashdig.evidence.lane_values import lane_values
from flashdig.evidence.sass import inner_loop, parse_sass
from flashdig.evidence.sass_card import with_measured
from flashdig.evidence.sass_operands import operands
from tests.unit.test_sass import card, code, listing

WARPS = 4
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200" / "dig.json"


def written_and_read(line: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    (instruction,) = parse_sass(code(line))
    found = operands(instruction)
    return found.written, [one.registers for one in found.read]


def numbered(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"R{first + step}" for step in range(count))


@pytest.mark.parametrize(
    ("line", "written", "read"),
    [
        ("FFMA R0, R1.reuse, -R2, |R3|", ("R0",), [("R1",), ("R2",), ("R3",)]),
        (
            "HMMA.16816.F32 R56, R108, R88, RZ",
            numbered(56, 4),
            [numbered(108, 4), ("R88", "R89"), ()],
        ),
        ("HMMA.1688.F32 R4, R8, R10, R4", numbered(4, 4), [("R8", "R9"), ("R10",), numbered(4, 4)]),
        ("HGMMA.64x64x16.F32 R24, gdesc[UR12], R24, gsb0", numbered(24, 32), None),
        ("LDS.128 R4, [R9+UR17+0xc000]", numbered(4, 4), [()]),
        ("STS.64 [R9], R20", (), [(), ("R20", "R21")]),
        ("LDSM.16.MT88.4 R68, [R146+0x4000]", numbered(68, 4), [()]),
        ("ISETP.GE.AND P5, PT, R21, UR31, PT", (), [("R21",), ("UR31",)]),
        ("SHFL.BFLY PT, R40, R31, 0x2, 0x1f", ("R40",), [("R31",), (), ()]),
        ("BAR.SYNC.DEFER_BLOCKING R4, 0x80", (), [("R4",), ()]),
        ("LDTM.16dp32bit_t0_t15.x32 R4, tmem[UR21]", numbered(4, 32), [()]),
        ("FFMA2 R4, R6.F32x2.HI_LO, R8.F32x2.HI_LO, R10", ("R4", "R5"), None),
    ],
)
def test_registers_of_an_instruction(line, written, read) -> None:
    found = written_and_read(line)
    assert found[0] == written
    if read is not None:
        assert found[1] == read


@pytest.mark.parametrize(
    ("name", "opcode", "each"),
    [
        ("v2_sm_80", "HMMA", 32),
        ("v2_sm_90", "HGMMA", 4),
        ("v1_sm_90", "HGMMA", 4),
        ("v2_sm_100", "UTCHMMA", 4),
        ("v2_sm_120", "HMMA", 32),
    ],
)
def test_half_of_the_products_are_scores_and_half_go_into_the_output(name, opcode, each) -> None:
    loop = inner_loop(parse_sass(listing(name))).instructions
    scores, output, unknown = sort_products(loop)
    assert (len(scores), len(output), unknown) == (each, each, [])
    assert {i.base for i in scores + output} == {opcode}
    if name == "v2_sm_80":  # its loop is not pipelined: all of Q K^T stands before the first exp2
        first = next(i.address for i in loop if i.opcode == "MUFU.EX2")
        assert max(i.address for i in scores) < first < min(i.address for i in output)


def test_the_tile_needs_as_many_products_as_there_are() -> None:
    assert card("v2_sm_90").gemms == Gemms(4, 4, 0, 4, 4)
    assert card("v2_sm_80").gemms == Gemms(32, 32, 0, 32, 32)
    # the size of tcgen05's products is not in the code
    assert card("v2_sm_100").gemms == Gemms(4, 4, 0)


def test_what_goes_through_shared_memory_is_left_open() -> None:
    scores, output, unknown = sort_products(
        inner_loop(parse_sass(listing("v2_fp32_sm_90"))).instructions
    )
    assert (len(scores), len(output), len(unknown)) == (512, 0, 512)
    said = Gemms(512, 0, 512, 512, 512).explain()
    assert said == (
        "products of the loop: 512 of 512 needed for Q K^T, 0 of 512 needed for P V; of 512 more "
        "the operands do not tell, as many as P V still needs"
    )
    assert Gemms(1, 2, 3).explain().endswith("2 for P V; of 3 more the operands do not tell")


LOOP = (
    ".L:",
    "HMMA.16816.F32 R4, R8, R12, RZ",
    "MUFU.EX2 R20, {exponent}",
    "F2FP.PACK_AB R24, R20, R20",
    "HMMA.16816.F32 R28, {left}, R32, R28",
    "@P0 BRA `(.L)",
    "EXIT",
)


def sorted_addresses(**names: str) -> list[list[int]]:
    loop = inner_loop(parse_sass(code(*(line.format(**names) for line in LOOP))))
    return [[i.address for i in group] for group in sort_products(loop.instructions)]


def test_only_what_flows_counts() -> None:
    assert sorted_addresses(exponent="R5", left="R24") == [[0x00], [0x30], []]
    # an exponential of something else; a left operand of something else
    assert sorted_addresses(exponent="R40", left="R24") == [[], [0x30], [0x00]]
    assert sorted_addresses(exponent="R5", left="R44") == [[0x00], [], [0x30]]


def test_a_product_that_is_rescaled_in_the_next_iteration_is_the_output() -> None:
    loop = inner_loop(
        parse_sass(
            code(
                ".L:",
                "MUFU.EX2 R20, R5",
                "FMUL R28, R28, R20",
                "HGMMA.64x8x16.F32 R28, gdesc[UR4], R28",
                "@P0 BRA `(.L)",
                "EXIT",
            )
        )
    )
    scores, output, unknown = sort_products(loop.instructions)
    assert (scores, [i.address for i in output], unknown) == ([], [0x20], [])


def addresses(*lines: str, threads: int = 64):
    """What the address of the one LDS among the lines is in every thread."""
    found = parse_sass(code(*lines))
    ((_, value),) = lane_values(found, threads, lambda i: i.base == "LDS").items()
    return value


def test_an_address_computed_from_the_thread() -> None:
    value = addresses(
        "S2R R0, SR_TID.X",
        "IMAD.SHL.U32 R1, R0, 0x10, RZ",
        "LOP3.LUT R1, R1, 0x7f0, RZ, 0xc0, !PT",
        "SHF.L.U32 R2, R0, 0x1, RZ",
        "LOP3.LUT R3, R1, 0x70, R2, 0x78, !PT",  # a ^ (b & c)
        "SGXT.U32 R4, R0, 0x2",
        "LEA R3, R4, R3, 0x8",
        "LEA.HI R3, R0, R3, RZ, 0x1d",  # + R0 >> 3
        "LDS R9, [R3.X4+-0x8]",
        "EXIT",
    )
    expected = [
        4 * ((((t * 16) & 0x7F0) ^ (0x70 & (2 * t))) + (t % 4) * 256 + t // 8) - 8
        for t in range(64)
    ]
    assert value.exact
    assert value.values.tolist() == expected


def test_a_predicate_that_differs_between_lanes() -> None:
    value = addresses(
        "S2R R0, SR_TID.X",
        "LOP3.LUT R1, R0, 0x4, RZ, 0xc0, !PT",
        "ISETP.NE.U32.AND P3, PT, R1, RZ, PT",
        "SEL R2, RZ, 0x1040, !P3",
        "@P3 IADD3 R2, R2, 0x1, RZ",
        "LDS R9, [R2]",
        "EXIT",
    )
    assert value.values.tolist() == [0x1041 if t & 4 else 0 for t in range(64)]


def test_a_buffer_of_a_pipeline_is_known_up_to_its_place() -> None:
    value = addresses(
        "S2R R0, SR_TID.X",
        "UMOV UR4, URZ",
        ".L:",
        "UIADD3 UR4, UR4, 0x1, URZ",
        "UISETP.GT.AND UP0, UPT, UR4, 0x2, UPT",
        "USEL UR4, UR4, URZ, !UP0",
        "ULEA UR5, UR4, 0x400, 0xd",
        "LDS R9, [R0.X16+UR5]",
        "@P0 BRA `(.L)",
        "EXIT",
    )
    assert value.bits == 13
    assert (value.values - value.values[0]).tolist() == [16 * t for t in range(64)]


@pytest.mark.parametrize(
    "line",
    [
        "LDG.E R1, [R2.64]",  # from memory
        "IMAD.HI R1, R0, R0, R0",  # an instruction that is not understood
        "LDS.64 R0, [RZ]",  # a pair: the second register is written too
        "@P1 MOV R1, R0",  # by a predicate that nobody knows
    ],
)
def test_what_is_not_understood_is_unknown(line) -> None:
    lines = ["S2R R1, SR_TID.X", line, "LDSM.16.M88.4 R8, [R1]", "EXIT"]
    found = parse_sass(code(*lines))
    values = lane_values(found, 32, lambda i: i.base == "LDSM")
    assert list(values.values()) == [None]


def banks(name: str) -> LoopBanks:
    found = parse_sass(listing(name))
    loop = inner_loop(found)
    return loop_banks(loop, loop_conflicts(found, loop, 32 * WARPS))


@pytest.mark.parametrize("exhibit", ["v2_fp32", "v2_transposed_fp32"])
def test_conflicts_in_the_code_are_those_of_the_cost_model(exhibit) -> None:
    """Both know the column of K that 16 lanes want; what else is there are copies of K and V."""
    found = banks(f"{exhibit}_sm_90")
    tile = exhibit_tile(64, 4)
    sizes = (tile.block_m, tile.block_n, 64, 64, tile.warps)
    modelled = fma_wavefronts(*sizes, k_is_transposed="transposed" in exhibit)
    assert found.known == found.instructions
    assert found.conflicts.wavefronts - modelled == 192
    # one wavefront a clock
    cycles = card(f"{exhibit}_sm_90").cycles
    assert cycles["shared memory"] == found.conflicts.wavefronts
    clean = fma_wavefronts(*sizes, k_is_transposed=True)
    assert found.conflicts.conflicts == modelled - clean


def test_conflicts_in_words() -> None:
    assert banks("v2_fp32_sm_90").explain() == (
        "bank conflicts: 6336 wavefronts an iteration where 2752 would do; the worst is LDS.128, "
        "8 times"
    )
    for name in ("v2_sm_80", "v2_sm_90", "v1_sm_90", "v2_sm_100", "v2_sm_120"):
        assert banks(name).explain().startswith("no bank conflicts in the loop's"), name


def test_a_layout_that_is_not_known() -> None:
    lines = (".L:", "LDG.E R1, [R2.64]", "LDS R9, [R1]", "HMMA.16816.F32 R4, R8, R12, R4")
    found = parse_sass(code(*lines, "@P0 BRA `(.L)", "EXIT"))
    loop = inner_loop(found)
    unknown = loop_banks(loop, loop_conflicts(found, loop, 32))
    assert (unknown.instructions, unknown.known, unknown.worst) == (1, 0, None)
    assert unknown.explain().startswith("bank conflicts unknown: the layout of the 1 accesses")


def test_cycles_measured_by_a_record() -> None:
    record = read_record(RECORD)
    plain = card("v2_fp32_sm_90")
    measured = with_measured(plain, record).measured
    assert measured.problem == "batch 10, heads 64, seqlen 1024, head_dim 64, float32"
    # 132 SMs did 640 heads of 32 x 32 tiles at the clock of that run
    row = next(
        row
        for row in record.rows
        for kernel in row.get("kernels", ())
        if kernel["name"] == plain.kernel and kernel["us"] == measured.kernel_us
    )
    cycles = measured.kernel_us * row["sm_clock_mhz"] * 132 / (640 * 32 * 32)
    assert measured.cycles == pytest.approx(cycles)
    # bank conflicts are what this kernel does: nothing else takes so long
    assert plain.limiter == "shared memory"
    assert measured.cycles == pytest.approx(plain.cycles["shared memory"], rel=0.05)
    said = with_measured(plain, record).sentences
    assert any(s.startswith(f"measured: {measured.cycles:.0f} cycles of an SM") for s in said)


def test_a_record_of_another_chip_or_kernel_measures_nothing() -> None:
    record = read_record(RECORD)
    for name in ("v2_sm_80", "v2_sm_100"):
        assert with_measured(card(name), record).measured is None
    other = dataclasses.replace(card("v2_sm_90"), kernel="gemm")
    assert with_measured(other, record).measured is None
