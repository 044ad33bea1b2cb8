"""Machine code read back: loops, families and cycles of our own kernels as they were compiled.

The listings are those of fp16, head_dim 64, full attention by Triton 3.6.0 (`nvdisasm -c -ndf`,
runs of spaces made one).
"""

import dataclasses
import gzip
import io
from pathlib import Path

import pytest
from rich.console import Console

from flashdig.cli import main
from flashdig.costs.compiled_loops import compiled_loop
from flashdig.evidence.offline import Compiled
from flashdig.evidence.sass import families, function_names, inner_loop, loops, parse_sass
from flashdig.evidence.sass_card import SassCard, TileShape, card_of, loop_cycles
from flashdig.hardware.arch import architecture
from flashdig.report.sass_terminal import show_against, show_cards

FOLDER = Path(__file__).parents[1] / "data" / "sass"
REGISTERS = {
    "v1_sm_90": 146,
    "v2_sm_80": 155,
    "v2_sm_90": 120,
    "v2_sm_100": 103,
    "v2_fp32_sm_90": 194,
    "v2_transposed_fp32_sm_90": 187,
}
FMA_LOOP = {"whole": {"FFMA": 4104}, "loop": {"FFMA": 4104, "MUFU.EX2": 40}}
SHARED = {
    "v1_sm_90": 57856,
    "v2_sm_80": 40960,
    "v2_sm_90": 57344,
    "v2_sm_100": 57376,
    "v2_fp32_sm_90": 45184,
    "v2_transposed_fp32_sm_90": 45184,
}


def listing(name: str) -> str:
    return gzip.decompress((FOLDER / f"{name}.sass.gz").read_bytes()).decode()


def card(name: str) -> SassCard:
    exhibit, arch = name.split("_sm_")
    arch = f"sm_{arch}"
    text = listing(name)
    (kernel,) = function_names(text)
    compiled = Compiled(
        name=kernel,
        registers=REGISTERS[name],
        stack_bytes=0,
        spill_store_bytes=0,
        spill_load_bytes=0,
        shared_bytes=SHARED[name],
        threads=128,
        grid=(16, 4, 1),
        opcodes={},
        order=(),
        listing=text,
    )
    return card_of(exhibit, arch, compiled)


def code(*lines: str) -> str:
    """Lines of assembly with addresses; a line that ends with a colon is a label."""
    text, address = [], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/ {line} ;")
            address += 16
    return "\n".join(text)


@pytest.mark.parametrize(
    ("name", "instructions", "head", "size", "products"),
    [
        ("v2_sm_80", 984, 0xF80, 461, {"HMMA": 64}),
        ("v2_sm_90", 936, 0x1050, 370, {"HGMMA": 8}),
        ("v2_sm_100", 1616, 0x30C0, 449, {"UTCHMMA": 8}),
        ("v1_sm_90", 1304, 0x1630, 929, {"HGMMA": 8}),
    ],
)
def test_inner_loops(name, instructions, head, size, products) -> None:
    found = parse_sass(listing(name))
    assert len(found) == instructions
    assert [i.address for i in found] == list(range(0, 16 * instructions, 16))
    loop = inner_loop(found)
    assert (loop.head, len(loop.instructions)) == (head, size)
    counts = families(loop.instructions)
    assert {key: counts[key] for key in counts if key.endswith("MMA")} == products


@pytest.mark.parametrize("exhibit", ["v1", "v2"])
def test_the_cost_model_counts_the_same_loop(exhibit) -> None:
    known = compiled_loop(architecture("sm_90"), exhibit, "float16", 64)
    assert card(f"{exhibit}_sm_90").loop_instructions == known.instructions(causal=False)


def test_families_of_a_whole_kernel() -> None:
    assert families(parse_sass(listing("v2_sm_90"))) == {
        "FFMA": 26,
        "HGMMA": 8,
        "MUFU.EX2": 34,
        "SHFL": 8,
        "LDS": 1,
        "LDSM": 4,
        "STS": 9,
        "LDGSTS": 24,
        "BAR": 7,
    }


def test_both_ways_to_write_a_target() -> None:
    labels = code("MOV R1, R2", ".L_x_1:", "FFMA R0, R1, R2, R0", "@!P3 BRA `(.L_x_1)", "EXIT")
    numbers = code("MOV R1, R2", "FFMA R0, R1, R2, R0", "@!P3 BRA 0x10", "EXIT")
    assert [i.target for i in parse_sass(labels)] == [None, None, 16, None]
    assert [(i.opcode, i.target, i.conditional) for i in parse_sass(numbers)] == [
        (i.opcode, i.target, i.conditional) for i in parse_sass(labels)
    ]


def test_a_uniform_predicate_stands_among_the_operands() -> None:
    found = parse_sass(code(".L_x_1:", "NOP", "BRA.U !UP0, `(.L_x_1)", "BRA `(.L_x_1)"))
    assert [i.conditional for i in found] == [False, True, False]


def test_a_retry_behind_the_end_makes_no_loop_of_what_it_returns_to() -> None:
    lines = (".L_loop:", "SYNCS.TRYWAIT P0", "@!P0 BRA `(.L_wait)", ".L_go:", "HMMA.16816.F32 R0")
    lines += ("@P1 BRA `(.L_loop)", "HMMA.16816.F32 R4", "EXIT")
    lines += (".L_wait:", "SYNCS.TRYWAIT P0", "@!P0 BRA `(.L_wait)", "BRA `(.L_go)")
    found = parse_sass(code(*lines))
    assert [(loop.head, len(loop.instructions)) for loop in loops(found)] == [(0, 7), (96, 2)]
    assert families(inner_loop(found).instructions) == {"HMMA": 1}


def test_the_innermost_of_nested_loops_and_none_for_a_trap() -> None:
    lines = (".L_a:", "HMMA.16816.F32 R0", ".L_b:", "HMMA.16816.F32 R4", "@P0 BRA `(.L_b)")
    found = parse_sass(code(*lines, "@P1 BRA `(.L_a)", "EXIT", ".L_c:", "BRA `(.L_c)"))
    assert [loop.head for loop in loops(found)] == [0, 16]
    assert inner_loop(found).head == 16
    assert inner_loop(parse_sass(code("HMMA.16816.F32 R0", "EXIT"))) is None


def test_what_is_no_listing_of_one_function() -> None:
    with pytest.raises(ValueError, match="no instructions"):
        parse_sass("hello")
    two = "\t.section\t.text.first,\n\t.section\t.text.second,\n"
    with pytest.raises(ValueError, match="2 functions in one listing, not one: first, second"):
        parse_sass(two)


def test_products_take_what_the_tile_needs() -> None:
    """A tile of 64 x 64 x 64 is 2^20 FLOP, by whatever instruction."""
    for name, rate in {"v2_sm_80": 2048, "v2_sm_90": 4096, "v2_sm_100": 8192}.items():
        assert card(name).cycles["tensor cores"] == 2**20 / rate, name


def test_cycles_of_the_other_pipes() -> None:
    hopper = card("v2_sm_90")
    assert hopper.exp2_expected == 32
    assert hopper.loop["MUFU.EX2"] == 34
    assert hopper.cycles["exp2"] == 34 * 128 / 16
    assert hopper.cycles["issue"] == 370 * 4 / 4
    # Q K^T reads both operands, P V reads V: 32 bytes deep, four instructions each
    wgmma = 32 * 4 * (64 + 64) + 32 * 4 * 64
    copies = 8 * 16 * 128
    assert hopper.cycles["shared memory"] == (wgmma + copies) / 128
    assert hopper.limiter == "issue"


def test_what_cannot_be_counted_is_unknown() -> None:
    blackwell = inner_loop(parse_sass(listing("v2_sm_100"))).instructions
    cycles = loop_cycles(architecture("sm_100"), blackwell, 128, None)
    assert cycles["tensor cores"] is None
    assert cycles["shared memory"] is None
    known = loop_cycles(architecture("sm_100"), blackwell, 128, TileShape(64, 64, 64))
    assert known["tensor cores"] == 128
    sparse = parse_sass(code("HGMMA.SP.64x64x32.F32 R24, gdesc[UR8], R24", "EXIT"))
    cycles = loop_cycles(architecture("sm_90"), sparse, 128, None)
    assert (cycles["tensor cores"], cycles["shared memory"]) == (None, None)
    # nobody measured mma.sync there
    ampere = inner_loop(parse_sass(listing("v2_sm_80"))).instructions
    assert loop_cycles(architecture("sm_100"), ampere, 128, None)["tensor cores"] is None


def test_sentences() -> None:
    said = card("v2_sm_90").sentences
    assert said[0] == "tensor cores by HGMMA"
    assert said[1].startswith("4 blocks = 16 of 64 warps = 25 %, limited by registers")
    assert said[2] == "34 exp2 a thread in the loop for 32 scores, 2 beyond them, as rescale " + (
        "factors are"
    )
    assert said[3:] == [
        "products of the loop: 4 of 4 needed for Q K^T, 4 of 4 needed for P V",
        "no bank conflicts in the loop's 8 shared-memory accesses",
        "busiest pipe of the loop: issue, 370 cycles",
    ]


def test_what_multiplies_in_words() -> None:
    hopper = card("v2_sm_90")
    for changes, sentence in (
        ({"whole": {"HMMA": 64}}, "tensor cores by HMMA, though sm_90 has wgmma"),
        ({"whole": {"HMMA": 64}, "arch": "sm_80"}, "tensor cores by HMMA"),
        (FMA_LOOP, "no tensor cores: the products are FFMA"),
        ({**FMA_LOOP, "arch": "sm_75"}, "no tensor cores on sm_75: Triton emits FFMA only"),
        ({"whole": {}, "loop": {"FFMA": 9, "MUFU.EX2": 9}}, "no matrix products in a loop"),
        ({"whole": {}, "loop": {}}, "no matrix products in a loop"),
    ):
        assert dataclasses.replace(hopper, **changes).sentences[0] == sentence
    spilling = dataclasses.replace(hopper, spill_bytes=1764)
    assert spilling.sentences[1].startswith("1764 bytes spilled")


def test_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=160)
    cards = [card("v2_sm_80"), card("v2_sm_90")]
    show_cards(cards, [("v2", "sm_75", "out of [memory]")], console)
    shown = stream.getvalue()
    rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
    assert ["HGMMA in the loop", "0", "8"] in rows
    assert ["loop cycles: tensor cores", "512", "256"] in rows
    assert ["v2", "sm_75", "out of [memory]"] in rows
    assert "sm_90: Tensor cores by HGMMA. 4 blocks" in shown


def test_terminal_side_by_side() -> None:
    stream = io.StringIO()
    show_against([(card("v2_sm_90"), card("v1_sm_90"))], [], Console(file=stream, width=160))
    rows = [[cell.strip() for cell in line.split("│")] for line in stream.getvalue().splitlines()]
    assert ["instructions in the loop", "370", "929", "+559"] in rows
    assert ["HGMMA", "8", "8", ""] in rows


@pytest.mark.parametrize(
    ("arguments", "code_of_exit", "message"),
    [
        (["v2", "--arch", "sm_55"], 2, "--arch: no facts about compute capability 'sm_55'"),
        (["v2", "--arch", "gfx942"], 2, "--arch must name NVIDIA chips"),
        (["v2", "--dtype", "float15"], 2, "nearest: float16"),
        (["v22"], 2, "unknown rung 'v22'; did you mean v2"),
        (["v2", "--head-dim", "48"], 2, "head_dim must be one of 16, 32, 64, 128, 256"),
        (["v1", "v2", "--against", "v2"], 2, "--against compares with one subject"),
        (["nowhere.cubin"], 3, "nowhere.cubin"),
    ],
)
def test_bad_arguments(arguments, code_of_exit, message, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sass", *arguments])
    assert ended.value.code == code_of_exit
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_cubin(tmp_path, capsys) -> None:
    path = tmp_path / "text.cubin"
    path.write_text("not a cubin")
    with pytest.raises(SystemExit) as ended:
        main(["sass", str(path)])
    assert ended.value.code == 3
    assert f"{path}: cuobjdump" in capsys.readouterr().err
