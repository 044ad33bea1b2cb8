"""Suites: what a TOML file may say, what it becomes, and the errors; cells and their filter."""

import re
from pathlib import Path

import pytest

from flashdig.bench.cells import Cell, CellFilterError, cell_filter, drawn_lengths
from flashdig.bench.suite import (
    PEERS,
    SuiteError,
    known_suites,
    load_suite,
    suite_from,
)

SUITES = Path(__file__).parents[2] / "benchmarks" / "suites"
PLAIN = {"batch": 2, "num_heads": 4, "seqlen": 64, "head_dim": 32}


def cell(**changes) -> Cell:
    (made,) = suite_from("one", {"cell": [{**PLAIN, **changes}]}).cells
    return made


def test_a_grid_is_every_combination_and_the_last_key_turns_fastest() -> None:
    suite = suite_from(
        "grid",
        {
            "peers": ["sdpa_flash"],
            "against": "sdpa_flash",
            "defaults": {"tokens": 1024, "num_heads": 8, "head_dim": 64},
            "grid": [{"causal": [False, True], "seqlen": [256, 512]}],
        },
    )
    assert [(c.causal, c.seqlen_q, c.batch) for c in suite.cells] == [
        (False, 256, 4),
        (False, 512, 2),
        (True, 256, 4),
        (True, 512, 2),
    ]
    assert suite.passes == ("forward", "backward")
    assert suite.ours == ("auto",)
    assert suite.rounds == 12


def test_windows_and_lengths_are_lists_and_may_be_listed_in_a_grid() -> None:
    grid = {**PLAIN, "window": [[16, 0], [-1, 4]]}
    windows = [c.window for c in suite_from("w", {"grid": [grid]}).cells]
    assert windows == [(16, 0), (-1, 4)]
    packed = {"num_heads": 4, "head_dim": 32, "lengths": [3, 9, 1]}
    made = suite_from("p", {"defaults": PLAIN, "cell": [packed]}).cells[0]
    assert (made.batch, made.seqlen_q, made.lengths) == (3, 9, (3, 9, 1))
    assert made.problem.packed


def test_what_a_cell_says_replaces_what_defaults_say_in_other_words() -> None:
    (made,) = suite_from("o", {"defaults": PLAIN, "cell": [{"seqlen_q": 10, "seqlen_k": 20}]}).cells
    assert (made.seqlen_q, made.seqlen_k, made.batch) == (10, 20, 2)
    (made,) = suite_from("o", {"defaults": PLAIN, "cell": [{"tokens": 128}]}).cells
    assert made.batch == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"cell": [{**PLAIN, "sofcap": 3.0}]}, r"cell 1: unknown key 'sofcap'.*softcap"),
        ({"cel": []}, r"the suite: unknown key 'cel'.*cell, grid"),
        ({"defaults": {"heads": 3}, "cell": [PLAIN]}, "defaults: unknown key 'heads'"),
        ({}, "no cells"),
        ({"cell": {"batch": 1}}, r"written as \[\[cell\]\]"),
        ({"cell": [{**PLAIN, "dtype": "int8"}]}, "dtype must be one of .*'bfloat16'.*got 'int8'"),
        ({"cell": [{**PLAIN, "batch": 0}]}, "batch must be an integer >= 1, got 0"),
        ({"cell": [{**PLAIN, "batch": True}]}, "batch must be an integer"),
        ({"cell": [{**PLAIN, "causal": 1}]}, "causal must be one of true, false.*got 1"),
        ({"cell": [{**PLAIN, "window": [3]}]}, "window must be"),
        ({"cell": [{**PLAIN, "window": [3, -2]}]}, "window must be"),
        ({"cell": [{**PLAIN, "dropout_p": 1.0}]}, "dropout_p must be a number >= 0 and < 1"),
        ({"cell": [{**PLAIN, "softcap": float("inf")}]}, "softcap must be"),
        ({"cell": [{**PLAIN, "num_heads_kv": 3}]}, "multiple of num_heads_kv"),
        ({"cell": [{**PLAIN, "seqlen_q": 3}]}, "seqlen_q cannot stand beside seqlen"),
        ({"cell": [{**PLAIN, "tokens": 64}]}, "batch cannot stand beside tokens"),
        ({"cell": [{**PLAIN, "lengths": [3]}]}, "batch cannot stand beside lengths"),
        ({"cell": [{"num_heads": 1, "head_dim": 8, "seqlen": 5}]}, "batch is missing"),
        ({"cell": [{"batch": 1, "head_dim": 8, "seqlen": 5}]}, "num_heads is missing"),
        (
            {"cell": [{"tokens": 100, "num_heads": 1, "head_dim": 8, "seqlen": 33}]},
            "multiple of seqlen_q",
        ),
        (
            {"cell": [{"num_heads": 1, "head_dim": 8, "lengths": [3], "bias": "float"}]},
            "bias is not defined for packed",
        ),
        (
            {"cell": [{"num_heads": 1, "head_dim": 8, "lengths": {"distribution": "normal"}}]},
            "distribution must be one of 'log-normal', got 'normal'",
        ),
        (
            {"cell": [{"num_heads": 1, "head_dim": 8, "lengths": {"distribution": "log-normal"}}]},
            "lengths: total is missing",
        ),
        ({"cell": [PLAIN], "peers": ["fa5"]}, "peers must be .*fa4"),
        ({"cell": [PLAIN], "passes": ["decode"]}, "passes must be"),
        ({"cell": [PLAIN], "measure": []}, "measure must be"),
        ({"cell": [PLAIN], "rounds": 0}, "rounds must be"),
        ({"cell": [PLAIN], "target_ms": -1}, "target_ms must be"),
        ({"cell": [PLAIN], "against": "fa3"}, "against must be one of the suite's peers"),
        ({"grid": [{**PLAIN, "causal": []}]}, "causal must be"),
        ({"grid": [{**PLAIN, "seqlen": [64, "long"]}]}, "grid 1: seqlen must be.*'long'"),
    ],
)
def test_errors_name_the_place_the_key_and_what_is_allowed(content, says) -> None:
    with pytest.raises(SuiteError, match=says):
        suite_from("bad", content)


def test_errors_of_a_file_name_it(tmp_path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("rounds = ")
    with pytest.raises(SuiteError, match=r"broken\.toml is not TOML"):
        load_suite(path)
    path.write_bytes(b"\xff")
    with pytest.raises(SuiteError, match=r"broken\.toml is not UTF-8"):
        load_suite(path)
    path.write_text("[[cell]]\nbatch = 0\n")
    with pytest.raises(SuiteError, match=r"broken\.toml: cell 1: batch"):
        load_suite(path)
    with pytest.raises(SuiteError, match=r"cannot read .*absent\.toml"):
        load_suite(tmp_path / "absent.toml")


def test_the_shipped_suites_are_sound() -> None:
    suites = {name: load_suite(path) for name, path in known_suites([SUITES]).items()}
    assert {"fa2-paper", "features", "memory", "smoke"} <= set(suites)
    paper = suites["fa2-paper"]
    assert len(paper.cells) == 36
    assert {(c.head_dim, c.num_heads) for c in paper.cells} == {(64, 32), (128, 16), (256, 8)}
    assert all(c.batch * c.seqlen_q == 16384 and c.num_heads * c.head_dim == 2048
               for c in paper.cells)  # fmt: skip
    assert {c.seqlen_q for c in paper.cells} == {512, 1024, 2048, 4096, 8192, 16384}
    assert all(c.passes is None and c.rounds is None for c in paper.cells)
    assert paper.rounds >= 12
    features = suites["features"].cells
    for asked in ("window", "softcap", "alibi", "sinks", "dropout_p", "lengths"):
        assert any(getattr(c, asked) for c in features), asked
    assert {"float", "bool"} <= {c.bias for c in features}
    assert {"float32", "float16"} <= {c.dtype for c in features}
    assert {96, 192} <= {c.head_dim for c in features}
    assert any((c.head_dim, c.head_dim_v) == (192, 128) for c in features)
    assert any(c.seqlen_q == 131072 for c in suites["memory"].cells)
    assert suites["memory"].measure == ("memory",)
    for suite in suites.values():
        titles = [c.title for c in suite.cells]
        assert len(set(titles)) == len(titles), suite.name


def test_flops_follow_the_published_rule_where_it_exists() -> None:
    full = 4 * 2 * 4 * 64 * 64 * 32
    assert cell().flops("forward") == full
    assert cell().flops("backward") == 5 * full // 2
    assert cell(causal=True).flops("forward") == full // 2
    # a window and packed sequences are counted pair by pair
    assert cell(causal=True, window=[0, 0]).flops("forward") == 4 * 2 * 4 * 64 * 32
    packed = Cell(2, 4, 4, 5, 5, 32, 32, causal=True, lengths=(5, 2))
    assert packed.flops("forward") == 4 * 4 * 32 * (15 + 3)


def test_drawn_lengths_add_up_and_repeat() -> None:
    arguments = {"total": 30000, "median": 1000, "sigma": 1.0, "longest": 4096, "seed": 3}
    lengths = drawn_lengths("log-normal", **arguments)
    assert sum(lengths) == 30000
    assert min(lengths) >= 1
    assert max(lengths) <= 4096
    assert lengths == drawn_lengths("log-normal", **arguments)
    assert lengths != drawn_lengths("log-normal", **{**arguments, "seed": 4})
    assert drawn_lengths("log-normal", **{**arguments, "sigma": 0.0}) == (1000,) * 30
    many = drawn_lengths("log-normal", total=10**6, median=200, sigma=0.5, longest=10**6, seed=0)
    assert sorted(many)[len(many) // 2] == pytest.approx(200, rel=0.05)


CELLS = [
    cell(),
    cell(causal=True),
    cell(head_dim=64, dtype="float32", softcap=3.0),
    cell(name="a window of its own", window=[16, 0]),
]


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("causal=true", [1]),
        ("causal=false,head_dim=32", [0, 3]),
        ("head_dim>=64", [2]),
        ("head_dim != 64 , causal!=true", [0, 3]),
        ("dtype=float32", [2]),
        ("softcap>0", [2]),
        ("Window", [3]),
        ("causal", [1, 3]),  # a window without a right side is causal
        ("of its own", [3]),
        ("head_dim 64", [2]),
        ("seqlen_q<1", []),
    ],
)
def test_a_filter_takes_what_fits(text, taken) -> None:
    takes = cell_filter(text)
    assert [number for number, one in enumerate(CELLS) if takes(one)] == taken


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("headdim=3", "'headdim' is not one of .*head_dim"),
        ("head_dim=many", "head_dim is compared with a number"),
        ("causal=maybe", "causal must be"),
        ("causal<true", "causal must be"),
        ("dtype<float32", "compare it with = or !="),
        ("head_dim=64,=3", re.escape("'=3' is not key=value")),
    ],
)
def test_a_bad_filter_is_refused(text, says) -> None:
    with pytest.raises(CellFilterError, match=says):
        cell_filter(text)


def test_titles_say_all_that_is_not_the_default() -> None:
    made = cell(causal=True, window=[16, 0], softcap=3.0, alibi=True, bias="bool", sinks=True,
                dropout_p=0.1, num_heads_kv=2)  # fmt: skip
    for part in (
        "heads 4/2", "causal", "window 16", "softcap 3", "ALiBi", "bool bias", "sinks",
        "dropout 0.1",
    ):  # fmt: skip
        assert part in made.title
    assert set(made.features) == {"window", "softcap", "alibi", "bias", "sinks", "dropout_p"}
    packed = Cell(2, 4, 4, 5, 5, 32, 32, lengths=(5, 2))
    assert packed.title.startswith("sequences 2, heads 4, longest 5")
    assert "7 tokens" in packed.title
    assert cell().features == {}


def test_peers_are_known_by_the_same_names_everywhere() -> None:
    from flashdig.bench.peers import peer

    assert [peer(name).name for name in PEERS] == list(PEERS)
