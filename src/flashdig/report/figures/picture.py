"""What a figure is on a page: a picture with its words, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Picture:
    """One figure of a page.

    Attributes:
        name: short, stable and unique on a page; every id inside `svg` begins with it.
        title: a heading, plain text.
        svg: one `<svg>` element to stand inline in HTML: no XML declaration, script, style sheet or
            reference to anything outside. Its text and axes are `currentColor`. It has role="img"
            and `alt` as its label.
        alt: what the picture shows and its key figures, for who cannot see it; plain text.
        caption: how to read it and where its numbers come from; plain text.
    """

    name: str
    title: str
    svg: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Missing:
    """A figure that cannot be drawn from this record, and why (plain text)."""

    name: str
    title: str
    reason: str
