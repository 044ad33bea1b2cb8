"""Figures of the dig's page: one module a figure, each a pure function from rows to a picture.

A page puts every `Picture.svg` into an element of class "picture", and `FIGURES_CSS` of `style.py`
once into its style sheet. Nothing here imports torch or Triton; matplotlib is imported when a
figure is drawn.
"""

from __future__ import annotations

from flashdig.report.figures.picture import Missing, Picture

__all__ = ["Missing", "Picture"]
