"""Figures of the dig's page: one module a figure, each a pure function from rows to a picture.

    pictures_of(rows, device_of_name(run.environment["gpu"]), walk())

A page puts every `Picture.svg` into an element of class "picture" and `FIGURES_CSS` once into its
style sheet. Nothing here imports torch or Triton; matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashdig.hardware.devices import Device
from flashdig.report.figures import (
    errors,
    ladder,
    memory_ledger,
    pipes,
    roofline,
    steps,
    walk_picture,
    waves,
)
from flashdig.report.figures.picture import Missing, Picture
from flashdig.report.figures.rung_rows import Row, problem_of
from flashdig.report.figures.style import FIGURES_CSS

if TYPE_CHECKING:
    from flashdig.generations.walk_data import Walk

__all__ = ["FIGURES_CSS", "Missing", "Picture", "pictures_of"]


def pictures_of(
    rows: Sequence[Row],
    device: Device | None,
    walk: Walk | None = None,
    *,
    prefix: str = "",
) -> list[Picture | Missing]:
    """All figures of one problem, in the order in which they tell the story.

    Args:
        rows: of kinds "rung" and "step", of one problem and one run, in the record's order.
        device: the chip that they ran on, or for a run without a GPU any chip to guess for; None
            where it is unknown.
        walk: for the figure of the online softmax, which no record holds; left out if not given.
        prefix: before every name, where a page has several problems.

    Raises ValueError for rows of several problems or runs, or with a prefix that is no part of an
    XML id.
    """
    if prefix and not prefix.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"prefix must be letters, digits, '-' and '_', got {prefix!r}")
    if len({(row["run_id"], problem_of(row)) for row in rows}) > 1:
        raise ValueError("rows must be of one problem and one run, got several")
    figures = [
        ladder.ladder(rows, device, f"{prefix}{ladder.NAME}"),
        steps.steps(rows, f"{prefix}{steps.NAME}"),
        roofline.roofline(rows, device, f"{prefix}{roofline.NAME}"),
        memory_ledger.memory_ledger(rows, device, f"{prefix}{memory_ledger.NAME}"),
        waves.waves(rows, device, f"{prefix}{waves.NAME}"),
        pipes.pipes(rows, device, f"{prefix}{pipes.NAME}"),
    ]
    if walk is not None:
        figures.append(walk_picture.walk_picture(walk, f"{prefix}{walk_picture.NAME}"))
    return [*figures, errors.errors(rows, f"{prefix}{errors.NAME}")]
