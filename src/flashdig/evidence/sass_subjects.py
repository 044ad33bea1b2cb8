"""What `flashdig sass` is asked about, made into cards: exhibits, kernels, cubins, cache folders.

What cannot be compiled or read becomes a failure, so that the rest is still shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from flashdig.evidence.kernel_source import KernelRequest, compile_kernel
from flashdig.evidence.offline import OfflineError, Request, compile_exhibits
from flashdig.evidence.sass_card import SassCard, UnreadableCubinError, card_of, card_of_cubin
from flashdig.evidence.triton_cache import CacheContents, CacheEntry
from flashdig.hardware.arch import UnknownArchitectureError
from flashdig.problem import AttentionProblem

Item = TypeVar("Item")


@dataclass(frozen=True)
class Failure:
    """An exhibit, kernel or file without a card; `arch` is empty where none is known."""

    subject: str
    arch: str
    error: str


@dataclass(frozen=True)
class Found:
    """Cards and failures, in the order of what was asked."""

    cards: tuple[SassCard, ...] = ()
    failures: tuple[Failure, ...] = ()

    def __add__(self, other: Found) -> Found:
        return Found(self.cards + other.cards, self.failures + other.failures)


def exhibit_cards(
    exhibits: Sequence[str], problem: AttentionProblem, archs: Sequence[str]
) -> Found:
    """Exhibits for each chip, chips side by side."""
    return _together(lambda arch: _exhibits(exhibits, problem, arch), archs)


def _exhibits(exhibits: Sequence[str], problem: AttentionProblem, arch: str) -> Found:
    """All in one process; each in one of its own when that fails, to keep what does compile."""
    requests = [Request(name, problem, arch) for name in exhibits]
    try:
        compiled = list(zip(exhibits, compile_exhibits(requests), strict=True))
    except OfflineError as error:
        if len(exhibits) == 1:
            return Found(failures=(Failure(exhibits[0], arch, str(error)),))
        return sum((_exhibits([name], problem, arch) for name in exhibits), Found())
    found = Found()
    for name, kernels in compiled:
        found += Found(tuple(card_of(name, arch, kernel) for kernel in kernels))
        if not kernels:
            reason = "launches no Triton kernel: there is nothing to compile"
            found += Found(failures=(Failure(name, arch, reason),))
    return found


def kernel_cards(requests: Sequence[KernelRequest], *, timeout_s: float = 300.0) -> Found:
    """Kernels of modules, each compiled in a process of its own."""

    def one(request: KernelRequest) -> Found:
        try:
            kernel, granted = compile_kernel(request, timeout_s=timeout_s)
        except OfflineError as error:
            return Found(failures=(Failure(request.subject, request.arch, str(error)),))
        note = f"taken for granted: {granted}" if granted else ""
        return Found((card_of(request.subject, request.arch, kernel, note=note),))

    return _together(one, requests)


def cache_cards(contents: CacheContents) -> Found:
    """The entries of a cache folder, by the names of their kernels."""

    def one(entry: CacheEntry) -> Found:
        subject = f"{entry.kernel} ({entry.folder[:8]})" if repeated(entry) else entry.kernel
        try:
            return Found((card_of_cubin(entry.cubin, subject=subject),))
        except (UnreadableCubinError, UnknownArchitectureError) as error:
            # the message begins with the file, which stands in the row already
            reason = str(error).removeprefix(f"{entry.cubin}: ")
            return Found(failures=(Failure(str(entry.cubin), entry.arch, reason),))

    names = [(entry.kernel, entry.arch) for entry in contents.entries]

    def repeated(entry: CacheEntry) -> bool:
        return names.count((entry.kernel, entry.arch)) > 1

    unreadable = (Failure(str(path), "", reason) for path, reason in contents.unreadable)
    return _together(one, contents.entries) + Found(failures=tuple(unreadable))


def _together(task: Callable[[Item], Found], items: Iterable[Item]) -> Found:
    """The tasks at the same time, as many as there are cores: they wait for other processes."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return sum(pool.map(task, items), Found())
