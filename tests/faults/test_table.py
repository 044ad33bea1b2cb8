"""README.md names every report once, only tests that exist, and every test of this folder."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
# fmt: off
REPORTS = (
    1, 4, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 22, 25, 27, 28, 29, 30, 32, 33, 35, 36, 37, 38, 39,
    40, 41, 42, 43,
)
# fmt: on
ROW = re.compile(r"^\| (B\d\d) \|(?P<cells>.*)\|$", re.MULTILINE)
NAMED = re.compile(r"\b(?P<module>\w+)::(?P<test>test_\w+)")


def rows():
    return [
        (match[1], [cell.strip() for cell in match["cells"].split("|")])
        for match in ROW.finditer((FOLDER / "README.md").read_text())
    ]


def folder_tests():
    found = []
    for path in FOLDER.glob("test_*.py"):
        if path.name == Path(__file__).name:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.append((path.stem.removeprefix("test_"), node.name))
    return found


def test_every_report_has_one_row() -> None:
    assert [report for report, _ in rows()] == [f"B{number:02}" for number in REPORTS]


def test_a_row_names_its_tests_or_what_it_waits_for() -> None:
    for report, (_, tests, devices, threads) in rows():
        assert re.search(r"\w+/[\w-]+#\d+", threads), report
        if tests.startswith("not yet: needs "):
            assert not devices, report
        else:
            assert NAMED.search(tests), report
            assert "CPU" in devices or "GPU" in devices, report


def test_the_tests_named_are_the_tests_there_are() -> None:
    named = [
        (match["module"], match["test"])
        for _, (_, tests, _, _) in rows()
        for match in NAMED.finditer(tests)
    ]
    assert sorted(named) == sorted(folder_tests())
