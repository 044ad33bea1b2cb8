"""The table of tiles: complete, well formed, and within what each chip's SM holds."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap

import pytest

from flashdig.hardware.arch import architecture
from flashdig.kernels.choose import (
    ARCHS,
    KINDS,
    PASSES,
    Pass,
    TileConfig,
    choose_config,
    choose_tile,
    known_arch,
    parse_table,
    table,
)
from flashdig.problem import AttentionProblem

HEAD_DIMS = range(8, 257, 8)
# the widest heads of which dK and dV are made in one launch
DKDV_WIDEST = 128
ELEMENT_BYTES = {"half": 2, "float32": 4, "tf32": 4}
DTYPE = {"half": "bfloat16", "float32": "float32", "tf32": "tf32"}

ROW = """
[[row]]
pass = ["forward"]
arch = ["sm_80"]
dtype = ["half"]
head_dim = 64
block_m = 64
block_n = 64
num_warps = 4
num_stages = 2
measured = "no"
"""


def served() -> list[tuple[Pass, int]]:
    """(pass, head_dim) that are launched."""
    return [
        (pass_, head_dim)
        for pass_, head_dim in itertools.product(PASSES, HEAD_DIMS)
        if pass_ != "dkdv" or head_dim <= DKDV_WIDEST
    ]


def block(head_dim: int) -> int:
    """The kernels' tiles are as wide as the next power of two."""
    return max(16, 1 << (head_dim - 1).bit_length())


def accumulator_registers(pass_: str, tile: TileConfig, head_dim: int) -> float:
    """float32 values that a thread keeps from tile to tile, and those of a tile of scores."""
    wide = block(head_dim)
    kept = {
        "forward": tile.block_m * wide,
        "dq": tile.block_m * wide,
        "dkdv": 2 * tile.block_n * wide,
        "dk": tile.block_n * wide,
        "dv": tile.block_n * wide,
    }[pass_]
    scores = tile.block_m * tile.block_n * (1 if pass_ in ("forward", "dv") else 2)
    return (kept + scores) / (32 * tile.num_warps)


def bytes_in_flight(pass_: str, tile: TileConfig, head_dim: int, element_bytes: int) -> int:
    """Shared memory of the walked operands, num_stages of each; what stays is in registers."""
    rows = tile.block_n if pass_ in ("forward", "dq") else tile.block_m
    return tile.num_stages * 2 * rows * block(head_dim) * element_bytes


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_problem_has_a_tile_that_fits_the_chip(arch: str, kind: str) -> None:
    chip = architecture(arch)
    for (pass_, head_dim), extra in itertools.product(served(), (False, True)):
        tile = choose_tile(pass_, arch, DTYPE[kind], head_dim, head_dim, extra)
        where = (pass_, head_dim, extra, tile)
        # a sixth of the registers for addresses, statistics and masks
        registers = accumulator_registers(pass_, tile, head_dim)
        assert registers <= chip.max_registers_per_thread * 5 / 6, where
        assert tile.num_warps * 32 * chip.max_registers_per_thread <= chip.registers, where
        shared = bytes_in_flight(pass_, tile, head_dim, ELEMENT_BYTES[kind])
        assert shared <= chip.shared_bytes_per_block, where


def test_extra_terms_never_take_a_larger_tile() -> None:
    for arch, kind in itertools.product(ARCHS, KINDS):
        for pass_, head_dim in served():
            without, with_terms = (
                choose_tile(pass_, arch, DTYPE[kind], head_dim, head_dim, extra)
                for extra in (False, True)
            )
            scores = [t.block_m * t.block_n / t.num_warps for t in (with_terms, without)]
            assert scores == sorted(scores), (arch, kind, pass_, head_dim)


def test_the_backward_makes_dk_and_dv_apart_where_the_table_has_no_tile_for_both() -> None:
    backward = pytest.importorskip("flashdig.kernels.triton.backward")
    assert backward.APART_ABOVE == DKDV_WIDEST
    assert max(row.head_dim for row in table() if "dkdv" in row.passes) == DKDV_WIDEST


def test_a_problem_is_chosen_for_by_its_widest_head_dtype_and_terms() -> None:
    plain = AttentionProblem.dense(2, 8, 4096, 64, "float16", causal=True)
    for pass_ in PASSES:
        expected = choose_tile(pass_, "sm_80", "float16", 64, 64, False)
        assert choose_config(plain, "sm_80", pass_) == expected
        for change in ({"bias": "bool"}, {"bias": "float"}, {"dropout": True}):
            chosen = choose_config(plain.replace(**change), "sm_80", pass_)
            assert chosen == choose_tile(pass_, "sm_80", "float16", 64, 64, True)
    wide = plain.replace(head_dim=192, head_dim_v=128)
    expected = choose_tile("forward", "sm_80", "float16", 192, 128, False)
    assert choose_config(wide, "sm_80", "forward") == expected
    assert expected == choose_tile("forward", "sm_80", "float16", 256, 256, False)
    narrow_v = choose_config(plain.replace(head_dim_v=192), "sm_80", "forward")
    assert narrow_v == choose_config(wide, "sm_80", "forward")
    single = plain.replace(dtype="float32")
    for tf32, dtype in ((False, "float32"), (True, "tf32")):
        chosen = choose_config(single.replace(allow_tf32=tf32), "sm_80", "dq")
        assert chosen == choose_tile("dq", "sm_80", dtype, 64, 64, False)
    # TF32 is a way to multiply float32 only
    assert choose_config(plain.replace(allow_tf32=True), "sm_80", "dq") == choose_config(
        plain, "sm_80", "dq"
    )


def test_lengths_and_batches_do_not_change_the_tile() -> None:
    """A kernel is compiled once for a model, whatever it is fed."""
    small = AttentionProblem.dense(1, 1, 1, 128)
    large = AttentionProblem.dense(64, 32, 65536, 128)
    for pass_, arch in itertools.product(PASSES, ARCHS):
        assert choose_config(small, arch, pass_) == choose_config(large, arch, pass_)


def test_what_has_no_tile_is_refused_by_name() -> None:
    problem = AttentionProblem.dense(1, 1, 128, 64)
    with pytest.raises(ValueError, match=r"arch must be one of sm_80, .*, got 'sm_75'"):
        choose_config(problem, "sm_75", "forward")
    with pytest.raises(ValueError, match=r"pass_ must be one of forward, .*, got 'backward'"):
        choose_config(problem, "sm_80", "backward")
    for dtype in ("float64", "float8_e4m3fn"):
        with pytest.raises(ValueError, match=rf"dtype must be one of float16, .*, got '{dtype}'"):
            choose_config(problem.replace(dtype=dtype), "sm_80", "forward")
    with pytest.raises(ValueError, match=r"head_dim 264 has no dq tile for bfloat16 on sm_120"):
        choose_config(problem.replace(head_dim_v=264), "sm_120", "dq")
    with pytest.raises(ValueError, match=r"head_dim 136 has no dkdv tile for bfloat16 on sm_90"):
        choose_config(problem.replace(head_dim=136), "sm_90", "dkdv")


def test_chips_between_the_known_ones_take_the_older_ones_tiles() -> None:
    for arch in ARCHS:
        capability = architecture(arch).key.split(".")
        assert known_arch((int(capability[0]), int(capability[1]))) == arch
    expected = {(8, 7): "sm_86", (10, 3): "sm_100", (11, 0): "sm_100", (12, 1): "sm_120"}
    assert {capability: known_arch(capability) for capability in expected} == expected
    with pytest.raises(ValueError, match=r"compute capability must be at least 8.0, got 7.5"):
        known_arch((7, 5))


def test_every_row_is_taken_by_something() -> None:
    taken = set()
    for arch, kind, extra in itertools.product(ARCHS, KINDS, (False, True)):
        for pass_, head_dim in served():
            rows = enumerate(table())
            taken.add(next(i for i, r in rows if r.serves(pass_, arch, kind, head_dim, extra)))
    assert taken == set(range(len(table())))


def test_rows_say_whether_they_were_measured() -> None:
    """A measured row names its chip, which is the only one that it serves, and the day."""
    chips = {"H200": "sm_90", "A100": "sm_80", "B200": "sm_100"}
    for row in table():
        if row.tile.measured != "no":
            chip, date, what = row.tile.measured.split(", ", 2)
            assert row.archs == (chips[chip],), row
            assert date.count("-") == 2, row
            assert what, row
    assert any(row.tile.measured == "no" for row in table())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("block_n = 64", "blok_n = 64", r"row 2 .*: unknown key 'blok_n'"),
        ("block_n = 64", "", r"row 2 .*: block_n is missing"),
        ('measured = "no"', "", r"row 2 .*: measured is missing"),
        ('measured = "no"', 'measured = ""', r"row 2 .*: measured must say where, or 'no'"),
        ("block_m = 64", "block_m = 48", r"row 2 .*: block_m must be one of \(16, .*, got 48"),
        ("block_m = 64", "block_m = true", r"row 2 .*: block_m must be one of .*, got True"),
        ("num_warps = 4", "num_warps = 3", r"row 2 .*: num_warps must be one of .*, got 3"),
        ("num_stages = 2", "num_stages = 0", r"row 2 .*: num_stages must be one of .*, got 0"),
        ("head_dim = 64", "head_dim = 96", r"row 2 .*: head_dim must be one of .*, got 96"),
        ('["sm_80"]', '["sm_75"]', r"row 2 .*: arch must be a list of .*, got \['sm_75'\]"),
        ('["forward"]', '"forward"', r"row 2 .*: pass must be a list of .*, got 'forward'"),
        ('["half"]', "[]", r"row 2 .*: dtype must be a list of .*, got \[\]"),
        ("[[row]]", "[[row]]\nextra_terms = 1", r"row 2 .*: extra_terms must be true or false"),
        ("[[row]]", "[[row]]\nspill_bytes = -4", r"row 2 .*: spill_bytes must be an integer >= 0"),
        ("[[row]]", "[other]\na = 1\n[[row]]", r"unknown table 'other'"),
    ],
)
def test_a_malformed_row_is_named(old: str, new: str, message: str) -> None:
    assert len(parse_table(ROW + ROW)) == 2
    assert old in ROW
    with pytest.raises(ValueError, match=message):
        parse_table(ROW + ROW.replace(old, new))


def test_spills_default_to_none_and_are_read() -> None:
    (row,) = parse_table(ROW)
    assert (row.tile.spill_bytes, row.extra_terms) == (0, None)
    (row,) = parse_table(ROW + "spill_bytes = 64\nextra_terms = true\n")
    assert (row.tile.spill_bytes, row.extra_terms) == (64, True)


def test_choosing_needs_neither_torch_nor_triton() -> None:
    """A report may ask which tile a chip would take, on a machine without them."""
    code = textwrap.dedent(
        """
        import sys
        from flashdig.kernels.choose import choose_tile
        choose_tile("forward", "sm_90", "bfloat16", 64, 64, False)
        assert not {"torch", "triton"} & set(sys.modules)
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
