"""Writes a page where --html says, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from flashdig.cli.errors import UsageError


def write_page(path: Path, page: str) -> None:
    """An interrupted run leaves no half-written page. Raises UsageError for a bad place."""
    partial = _beside(path)
    try:
        try:
            partial.write_text(page, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror or error}") from error


def require_place(path: Path) -> None:
    """Find out before the work, not after it, that a page cannot be written. Raises UsageError."""
    if path.is_dir():
        raise UsageError(f"--html: {path} is a folder")
    try:
        _beside(path).touch()
        _beside(path).unlink()
    except OSError as error:
        raise UsageError(f"--html: cannot write {path}: {error.strerror or error}") from error


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
