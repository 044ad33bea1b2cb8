"""The kernels of a Triton cache folder (~/.triton/cache): a cubin and what Triton says about it.

Every folder below it that holds NAME.cubin is an entry, with NAME.json (metadata) and NAME.ptx
beside it. Entries that cannot be read are named, with the reason; they are no error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdig.hardware.arch import UnknownArchitectureError, architecture

_BESIDE_METADATA = ("cubin", "hsaco", "ttir", "ttgir", "llir", "ptx", "source")


@dataclass(frozen=True)
class CacheEntry:
    """One compiled kernel.

    Attributes:
        cubin: its file; kernel: as profilers show it; arch: as "sm_90".
    """

    cubin: Path
    kernel: str
    arch: str

    @property
    def folder(self) -> str:
        """The name of the entry's folder, a hash."""
        return self.cubin.parent.name


@dataclass(frozen=True)
class CacheContents:
    """What a cache folder holds: entries, and (file, reason) of what could not be read."""

    entries: tuple[CacheEntry, ...]
    unreadable: tuple[tuple[Path, str], ...]


def read_cache(
    folder: Path, *, name_contains: str | None = None, archs: Iterable[str] | None = None
) -> CacheContents:
    """The kernels of a cache folder, in the order of their names, chips and files.

    Args:
        name_contains: only kernels with this in their names, in any case.
        archs: only kernels for these chips, as "sm_90"; None for all.

    Raises ValueError when it is no folder, or when nothing in it was compiled.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    wanted = None if archs is None else set(archs)
    entries, unreadable = [], []
    described = sorted(
        path
        for path in folder.rglob("*.json")
        if not path.name.startswith("__grp__") and not path.name.endswith(".autotune.json")
    )
    described = [path for path in described if _is_metadata(path)]
    bare = set(folder.rglob("*.cubin")) - {path.with_suffix(".cubin") for path in described}
    for path in described:
        try:
            entry = _entry(path)
        except ValueError as error:
            unreadable.append((path, str(error)))
            continue
        if name_contains is not None and name_contains.lower() not in entry.kernel.lower():
            continue
        if wanted is None or entry.arch in wanted:
            entries.append(entry)
    unreadable += [(path, "no metadata (NAME.json) beside it") for path in sorted(bare)]
    if not described and not bare:
        raise ValueError(f"{folder}: no kernel compiled by Triton in this folder")
    entries.sort(key=lambda entry: (entry.kernel, int(entry.arch[3:]), str(entry.cubin)))
    return CacheContents(tuple(entries), tuple(unreadable))


def _is_metadata(path: Path) -> bool:
    """Whether it describes a kernel: other files of Triton's stand alone."""
    return any(path.with_suffix(f".{suffix}").exists() for suffix in _BESIDE_METADATA)


def _entry(path: Path) -> CacheEntry:
    try:
        metadata = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"not Triton's metadata: {error}") from error
    target = metadata.get("target") if isinstance(metadata, dict) else None
    if not isinstance(target, dict) or not isinstance(metadata.get("name"), str):
        raise ValueError("not Triton's metadata: it names no kernel or no target")
    if target.get("backend") != "cuda":
        raise ValueError(f"compiled for {target.get('backend')}, not for an NVIDIA chip")
    try:
        arch = architecture(str(target.get("arch"))).key
    except UnknownArchitectureError as error:
        raise ValueError(str(error)) from error
    cubin = path.with_suffix(".cubin")
    if not cubin.exists():
        raise ValueError(f"{cubin.name} is missing")
    return CacheEntry(cubin, metadata["name"], f"sm_{arch.replace('.', '')}")


def metadata_beside(cubin: Path) -> dict[str, Any]:
    """Triton's metadata beside a cubin; empty without them. Raises ValueError for other content."""
    beside = cubin.with_suffix(".json")
    if not beside.exists():
        return {}
    try:
        metadata = json.loads(beside.read_text())
    except ValueError as error:
        raise ValueError(f"{beside}: not Triton's metadata: {error}") from error
    if not isinstance(metadata, dict):
        raise ValueError(f"{beside}: not Triton's metadata: it must be an object")
    return metadata
