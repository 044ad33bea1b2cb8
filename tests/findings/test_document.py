"""The documentation names every rule."""

from pathlib import Path

from flashdig.findings.counters import COUNTER_RULES
from flashdig.findings.rules import TRACE_RULES

TEXT = (Path(__file__).parents[2] / "docs" / "findings.md").read_text()


def test_every_rule_is_described() -> None:
    tables = TEXT.split("## Rules that read counters")
    for rule in TRACE_RULES:
        assert f"`{rule}`" in tables[0], rule
    for rule in COUNTER_RULES:
        assert f"`{rule}`" in tables[1], rule
