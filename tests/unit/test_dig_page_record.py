"""What no page is drawn from: damaged records, other schemas, wrong options. And cards in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashdig.bench.results import Record, RecordError, _record_from
from flashdig.cli import main
from flashdig.evidence.card_file import UnreadableCardsError, cards_to_json, read_cards
from flashdig.report.dig_page_findings import comparisons
from flashdig.report.dig_page_record import Dig, dig_of
from flashdig.report.dig_page_tables import error_table, ladder_table, rung_words
from flashdig.report.dig_page_trust import machines, trust
from flashdig.report.dig_page_words import tiles, verdict
from tests.dig_pages import as_dict, record_path, small_record, write


def refused(arguments: list[str], code: int, capsys) -> str:
    """What the command says, on one line, when it ends with `code`."""
    with pytest.raises(SystemExit) as stopped:
        main(["dig", *arguments])
    assert stopped.value.code == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1
    return printed.err


def damaged(tmp_path: Path, content: Any) -> list[str]:
    path = tmp_path / "dig.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return ["--from", str(path), "--html", str(tmp_path / "page.html")]


def changed(place: str, value: Any) -> dict[str, Any]:
    """The small record with one value replaced; "rows.0.predicted.kernels" is a place."""
    content = as_dict(small_record())
    inner: Any = content
    *path, last = place.split(".")
    for step in path:
        inner = inner[int(step)] if isinstance(inner, list) else inner[step]
    inner[int(last) if isinstance(inner, list) else last] = value
    return content


WHOLE = small_record().to_json()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        (WHOLE[: len(WHOLE) // 2], "not JSON"),
        (WHOLE[:-3], "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"schema": ' + "1" * 5000 + "}", "not JSON"),
        ("[]", "schema"),
        ("null", "schema"),
        ('{"schema": 1}', "missing"),
        (WHOLE.replace('"schema": 1', '"schema": 0'), "schema 0 is not the one"),
        (WHOLE.replace('"schema": 1', '"schema": 2'), "schema 2 is not the one"),
        (WHOLE.replace('"schema": 1', '"schema": "1"'), "schema '1' is not the one"),
        (Record("dig").to_json(), "nothing to show"),
    ],
)
def test_what_is_no_record_is_one_clear_line(text, says, tmp_path, capsys) -> None:
    error = refused(damaged(tmp_path, text), 3, capsys)
    assert says in error
    assert "dig.json" in error
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("runs", [], "runs must be an object"),
        ("rows", {}, "rows must be a list"),
        ("rows.0", None, "row 1 must be an object"),
        ("rows.0.sentence", None, "sentence missing"),
        ("rows.0.name", None, "name missing"),
        ("rows.0.ms", "fast", "ms must be"),
        ("rows.0.ms_all", [], "ms_all must be"),
        ("rows.1.run_id", "other", "'other' is not a run"),
        ("rows.0.unheard_of", 1, "unknown field 'unheard_of'"),
        ("rows.0.num_heads_kv", 7, "num_heads"),
        ("rows.0.head_dim", 0, "head_dim"),
        ("rows.0.features", {"path": "sideways"}, "features.path must be one of"),
        ("rows.0.features", {"tf32": 1}, "features.tf32 must be true or false"),
        ("rows.0.features", {"instructions": {"BAR": 1}}, "SHFL, LDS, LDSM, STS missing"),
        ("rows.0.predicted", [], "predicted must be an object"),
        ("rows.0.predicted.kernels", "five", "predicted.kernels must be an integer"),
        ("rows.0.predicted.occupancy", -1, "predicted.occupancy must be a number >= 0"),
        ("rows.0.predicted.triton_load_bytes", None, "triton_load_bytes missing"),
        ("rows.0.predicted.at_observed_clock", 3, "at_observed_clock must be an object"),
        ("rows.0.predicted.at_observed_clock.expected_ms", [], "expected_ms must be a number"),
        ("rows.0.predicted.load_bytes", 10**30, "must lie within"),
        ("rows.0.kernels.0.us", None, "us missing"),
        ("rows.0.kernels.1.grid", [1, 2], "grid must be three integers"),
        ("rows.0.kernels.1.occupancy_percent", "full", "occupancy_percent must be a number"),
        ("rows.0.surprises", [{"what": "time"}], "surprises must be"),
        ("rows.0.seqlen_q", 10**400, "must lie within"),
    ],
)
def test_a_damaged_row_is_named(place, value, says, tmp_path, capsys) -> None:
    assert says in refused(damaged(tmp_path, changed(place, value)), 3, capsys)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("gpu", 5, "environment.gpu must be a string"),
        ("compute_capability", [9], "environment.compute_capability must be a string"),
        ("power_limit_w", "700", "environment.power_limit_w must be a number"),
        ("memory_bytes", 10**300, "must lie within"),
    ],
)
def test_a_damaged_environment_is_named(name, value, says, tmp_path, capsys) -> None:
    content = as_dict(small_record())
    (run,) = content["runs"].values()
    run["environment"][name] = value
    assert says in refused(damaged(tmp_path, content), 3, capsys)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places of all values inside, containers too."""
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for name, inner in steps:
        found.append((*path, name))
        if isinstance(inner, dict | list) and name != "ms_all":
            found += leaves(inner, (*path, name))
    return found


def test_any_single_damage_is_refused_or_borne() -> None:
    """Every value of a row becomes another type or an extreme: an error with a place, or a page."""
    content = as_dict(small_record(("naive", "v2")))
    whole = json.dumps(content)
    refusals = drawn = 0
    for path in leaves(content["rows"], ("rows",)):
        for value in (None, "x", -1, 0, 1e300, True, [], {}, [None], {"x": 1}):
            damage = json.loads(whole)
            inner = damage
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = value
            try:
                dig = dig_of(_record_from(damage), "x")
            except RecordError:
                refusals += 1
                continue
            drawn += 1
            words_of(dig)
    assert refusals > 400
    assert drawn > 100


def words_of(dig: Dig) -> None:
    """All of a page but its pictures."""
    for problem in dig.problems:
        compared = comparisons(problem.ladder)
        assert verdict(dig, problem, compared)
        tiles(dig, compared)
        ladder_table(problem.rows)
        error_table(problem.ladder)
        rung_words(problem.rows, kernels=True)
    assert trust(dig)
    assert machines(dig.runs)
    assert dig.card_key is None or dig.card_key.words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--preset", "all"], "--from runs nothing: --preset"),
        (["--seqlen", "64", "--steps"], "--seqlen, --steps"),
        (["--counters"], "--counters cannot be given"),
        (["--run", "no-such-run"], "--run"),
        (["--problem", "no such problem"], "--problem"),
        (["--html", "/proc/nowhere/page.html"], "/proc/nowhere"),
        (["--html", "/"], "folder"),
    ],
)
def test_wrong_options_beside_a_record(arguments, says, tmp_path, capsys) -> None:
    path = write(small_record(), tmp_path / "dig.json")
    assert says in refused(["--from", str(path), *arguments], 2, capsys)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--run", "x"], "--run goes with --from"),
        (["--problem", "x"], "--problem goes with"),
        (["--walk", "--html", "x.html"], "--walk"),
        (["--html", "/proc/nowhere/page.html", "--seqlen", "16"], "/proc/nowhere"),
    ],
)
def test_options_that_go_together(arguments, says, capsys) -> None:
    assert says in refused(arguments, 2, capsys)


def test_a_missing_record_is_one_clear_line(tmp_path, capsys) -> None:
    path = tmp_path / "none.json"
    assert "none.json does not exist" in refused(["--from", str(path)], 3, capsys)
    assert "cannot read" in refused(["--from", str(tmp_path)], 3, capsys)


def test_a_record_is_shown_on_the_terminal_and_as_json(tmp_path, capsys) -> None:
    path = write(small_record(), tmp_path / "dig.json")
    with pytest.raises(SystemExit) as stopped:
        main(["dig", "--from", str(path)])
    assert not stopped.value.code
    assert "15.39x faster than v1" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main(["dig", "--from", str(path), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in printed["rows"]] == ["v1", "v2"]
    assert list(printed["runs"]) == [printed["rows"][0]["run_id"]]


CARDS = record_path("nvidia-h200").with_name("cards.json")


def test_cards_of_every_problem_are_kept_and_read_back() -> None:
    found = read_cards(CARDS)
    record = dig_of(small_record(), "x")
    assert record.card_key in found
    for key, cards in found.items():
        assert [card.subject for card in cards.cards] == ["v1", "v2"], cards.failures
        assert {card.arch for card in cards.cards} == {key.arch}
    assert json.loads(cards_to_json(list(found.values()), "x"))["compiled"][0]["cards"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"suite": "cards"', '"suite": "dig"', "cards"),
        ('"schema": 1', '"schema": 7', "schema 7"),
        ('"registers": ', '"register": ', "'registers' missing"),
        ('"registers": ', '"registers": null, "was": ', "registers must be a number"),
        ('"occupancy": {', '"occupancy": {"x": 1, ', "x"),
        ('"compiled"', '"complied"', "'compiled' missing"),
        ("]}", "", "not JSON"),
    ],
)
def test_damaged_cards_are_one_clear_line(old, new, says, tmp_path, capsys) -> None:
    path = tmp_path / "cards.json"
    text = CARDS.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UnreadableCardsError, match=r"cards\.json"):
        read_cards(path)
    write(small_record(), tmp_path / "dig.json")
    page = str(tmp_path / "page.html")
    error = refused(["--from", str(tmp_path / "dig.json"), "--html", page], 3, capsys)
    assert says in error
