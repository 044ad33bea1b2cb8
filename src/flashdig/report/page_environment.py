"""How every page's templates are rendered: what data holds is text, and a missing name an error."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def page_environment() -> Environment:
    """Templates of `flashdig.report`, with all that is filled in escaped."""
    return Environment(
        loader=PackageLoader("flashdig.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
