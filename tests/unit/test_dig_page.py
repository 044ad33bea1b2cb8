"""The dig's page: what it says, that it is whole and offline, and that it is what is committed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from markupsafe import Markup

from flashdig.bench.results import Record, read_record
from flashdig.bench.rows import RecordError
from flashdig.cli import main
from flashdig.costs.units import with_unit
from flashdig.report.dig_page import generator
from flashdig.report.dig_page_findings import comparisons, shares_of_gain
from flashdig.report.dig_page_glossary import TERMS, Glossary
from flashdig.report.dig_page_record import UnknownProblemError, dig_of
from flashdig.report.dig_page_tables import counters_table
from flashdig.report.dig_page_trust import machines, trust
from flashdig.report.dig_table import COLUMNS, surprise_lines
from tests.dig_pages import (
    HOSTILE,
    MACHINES,
    REPORTS,
    Parsed,
    hostile_page,
    page_of,
    record_path,
    small_record,
)
from tests.figure_cases import with_counters


@pytest.fixture(scope="module", params=MACHINES)
def drawn(request, tmp_path_factory) -> tuple[str, str]:
    """A machine, and the page that the command draws from its record."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    main_of(["dig", "--from", str(record_path(request.param)), "--html", str(path)])
    assert [other.name for other in path.parent.iterdir()] == ["page.html"]
    return request.param, path.read_text(encoding="utf-8")


def main_of(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert not stopped.value.code


def test_page_is_whole_and_offline(drawn) -> None:
    _, content = drawn
    page = Parsed(content)
    assert len(content.encode()) < 1_000_000
    assert page.fetched == page.handlers == []
    assert not {"script", "link", "iframe", "img", "object"} & page.tags.keys()
    assert not re.search(r"url\((?!#)|@import", content)
    assert set(re.findall(r"https?://[^\"'<\s]+", content)) <= {"http://www.w3.org/2000/svg"}
    assert [name for name, count in page.ids.items() if count > 1] == []
    assert set(page.links) <= page.ids.keys()
    assert content.startswith('<!doctype html>\n<html lang="en">')
    assert page.tags["h1"] == page.tags["main"] == page.tags["nav"] == 1
    assert page.tags["svg"] == content.count('role="img"') > 5
    for words in ("prefers-color-scheme: dark", "@media print", "focus-visible", 'class="skip"'):
        assert words in content


def test_page_tells_the_story_of_the_terminal(drawn) -> None:
    machine, content = drawn
    text = Parsed(content).text
    for problem in dig_of(read_record(record_path(machine)), "dig.json").problems:
        assert problem.title in text
        for row in problem.ladder:
            assert " ".join(row["sentence"].split()) in text
            for line in surprise_lines(row):
                assert " ".join(line.split()) in text
            cells = [column.cell(row) for column in COLUMNS]
            assert all(" ".join(cell.split()) in text for cell in cells)


def test_committed_page_is_what_the_record_draws(drawn) -> None:
    """Everything with the same versions; with another matplotlib all but the shapes it draws."""
    machine, content = drawn
    committed = (REPORTS / f"{machine}.html").read_text(encoding="utf-8")
    (made_by,) = re.findall(r'<meta name="generator" content="([^"]*)">', committed)
    if made_by == generator():
        assert content == committed
    else:
        shapes = re.compile(r"<svg.*?</svg>", re.DOTALL)
        committed = committed.replace(made_by, generator())
        assert shapes.sub("", content) == shapes.sub("", committed)


def test_markup_in_a_record_is_shown_as_text() -> None:
    content = hostile_page()
    page = Parsed(content)
    assert page.fetched == page.handlers == []
    assert not {"script", "img"} & page.tags.keys()
    assert page.text.count("<script>alert('dug')</script>") > 10
    assert HOSTILE in page.text


def test_main_problem_is_chosen_by_a_part_of_its_title() -> None:
    record = read_record(record_path("nvidia-h200"))
    assert dig_of(record, "x").main.preset is None
    chosen = dig_of(record, "x", wanted="float32 with TF32")
    assert chosen.main.title.endswith("float32 with TF32")
    assert len(chosen.problems) == len(dig_of(record, "x").problems)
    exact = "archaeology: batch 10, heads 64, seqlen 1024, head_dim 64, float32"
    assert dig_of(record, "x", wanted=exact).main.title == exact
    with pytest.raises(UnknownProblemError, match="archaeology"):
        dig_of(record, "x", wanted="no such")


def test_a_problem_keeps_the_longest_ladder_and_its_steps() -> None:
    record = read_record(record_path("nvidia-h200"))
    dig = dig_of(record, "x", wanted="archaeology")
    assert len(dig.main.ladder) == 10
    assert list(dig.main.steps) == ["cumulative", "leave-one-out", "pair"]
    for rows in (dig.main.ladder, *dig.main.steps.values()):
        assert len({row["run_id"] for row in rows}) == 1
    one = dig_of(record, "x", run_id="20261129T195118Z-2a13")
    assert [row["name"] for row in one.main.ladder] == ["v1", "v2", "v2_transposed"]
    with pytest.raises(RecordError, match="no run 'none'"):
        dig_of(record, "x", run_id="none")


def test_surprises_come_first_and_the_largest_on_top() -> None:
    rows = dig_of(read_record(record_path("nvidia-h200")), "x").main.ladder
    found = comparisons(rows)
    assert [one.is_surprise for one in found[:3]] == [True, True, False]
    assert (found[0].rung, found[0].guessed, found[0].found) == ("sdpa_math", "14", "17")
    assert not any(one.is_surprise for one in found[2:])
    exact = {one.words for one in found if one.what in ("loads", "stores")}
    assert exact == {"to the byte"}
    assert all(one.difference == "" for one in found if one.what in ("loads", "stores"))


def test_measured_memory_is_a_guess_against_found_a_table_and_a_reason_to_trust() -> None:
    plain = small_record(("v1", "v2", "sdpa_flash"))
    record = Record("dig", plain.runs, tuple(with_counters(list(plain.rows))))
    dig = dig_of(record, "x")
    compared = {(one.rung, one.what): one for one in comparisons(dig.main.ladder)}
    one = compared["v2", "memory bytes"]
    v2 = next(row for row in dig.main.ladder if row["name"] == "v2")
    counters, predicted = v2["counters"], v2["predicted"]
    total = counters["dram_read_bytes"] + counters["dram_write_bytes"]
    expected = predicted["memory_load_bytes"] + predicted["memory_store_bytes"]
    assert (one.guessed, one.found) == (with_unit(expected, "B"), with_unit(total, "B"))
    table = counters_table(dig.main.ladder)
    assert table is not None
    # library kernels too, whose bytes the picture cannot know
    assert [row.name for row in table.rows] == ["v1", "v2", "sdpa_flash"]
    cells = dict(zip(table.columns[1:], table.rows[1].cells, strict=True))
    assert cells["read"] == with_unit(counters["dram_read_bytes"], "B")
    assert cells["read + written"] == with_unit(total, "B")
    assert cells["expected"] == with_unit(expected, "B")
    assert cells["kernels"] == "2"
    assert dict(trust(dig))["memory counters"].startswith("of 3 of 3 rungs, by Nsight Compute 2026")
    text = Parsed(page_of(dig)).text
    for words in ("asked of the L2", "memory bytes", "DRAM", "from a cold L2 cache"):
        assert words in text
    assert "no memory counters were read" not in text
    without = dig_of(plain, "x")
    assert counters_table(without.main.ladder) is None
    assert "memory counters" not in dict(trust(without))
    assert "no memory counters were read in this run" in Parsed(page_of(without)).text


def test_shares_up_to_the_fastest_rung_add_up_to_one() -> None:
    rows = dig_of(read_record(record_path("nvidia-h200")), "x").main.ladder
    shares = shares_of_gain(rows)
    assert list(shares) == [row["name"] for row in rows[1:]]
    assert sum(share.fraction for share in shares.values()) == pytest.approx(1.0)
    assert shares["v1"].fraction < 0 < shares["v2"].fraction
    assert shares["v2"].below == "v1"
    assert shares_of_gain(rows[:1]) == {}
    assert shares_of_gain([rows[-1], rows[0]]) == {}, "nothing is faster than the first"


def test_trust_says_how_it_was_measured_and_sees_a_slowed_chip() -> None:
    record = small_record()
    facts = dict(trust(dig_of(record, "x")))
    assert "no sign of throttling" in facts["clocks and throttling"]
    assert facts["samples"].startswith("12 rounds")
    assert "CUDA graph" in facts["times"]
    assert "to 6" in facts["power"] or "W of at most 700 W" in facts["power"]
    assert facts["gate"] == "2 of 2 rungs ran and agree with float64"
    record.rows[1]["sm_clock_mhz"] = 1400.0
    facts = dict(trust(dig_of(record, "x")))
    assert "1400 to 1965 MHz" in facts["clocks and throttling"]
    assert facts["clocks and throttling"].endswith("slowed down (by power or heat) in v2")
    for row in record.rows:
        row["sm_clock_mhz"] = None
    assert "not read" in dict(trust(dig_of(record, "x")))["clocks and throttling"]


def test_runs_of_one_environment_share_it() -> None:
    (run,) = small_record().runs
    second = replace(run, run_id="b")
    third = replace(run, run_id="c", environment={**run.environment, "torch": "9.9"})
    found = machines({one.run_id: one for one in (run, second, third)})
    assert [[run_id for run_id, _ in one.runs] for one in found] == [[run.run_id, "b"], ["c"]]
    assert ("power limit", "700 W") in found[0].environment
    assert ("torch", "9.9") in found[1].environment


def test_first_use_of_a_word_is_a_link_and_later_ones_are_not() -> None:
    glossary = Glossary()
    first = glossary.link("SMs & <waves> of warps; a step:lse is no lse")
    assert first == Markup(
        '<a class="term" href="#term-sm">SMs</a> &amp; &lt;<a class="term" href="#term-wave">waves'
        '</a>&gt; of <a class="term" href="#term-warp">warps</a>; a step:lse is no '
        '<a class="term" href="#term-lse">lse</a>'
    )
    assert glossary.link("SM, wave, warp") == "SM, wave, warp"
    assert [term.key for term in glossary.used] == ["lse", "sm", "warp", "wave"]
    with pytest.raises(TypeError, match="plain text"):
        glossary.link(Markup("SM"))


def test_every_word_is_explained_once() -> None:
    forms = [form for term in TERMS for form in (term.word, *term.forms)]
    assert len(set(forms)) == len(forms)
    assert len({term.key for term in TERMS}) == len(TERMS)


def test_words_of_a_page_are_those_that_it_links(drawn) -> None:
    page = Parsed(drawn[1])
    explained = [name for name in page.ids if name.startswith("term-")]
    assert sorted(explained) == sorted(link for link in page.links if link.startswith("term-"))
    assert len(explained) > 15


def test_a_record_without_rungs_is_refused() -> None:
    with pytest.raises(RecordError, match="nothing to show"):
        dig_of(Record("dig"), "x")
