"""What surrounds the compilation of a kernel: a word to the user, a cache that can be written.

Compiling takes seconds the first time on a machine. Whoever waits longer than `PATIENCE` is told
why, once a kernel, on standard error.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import TypeVar

from triton import knobs

PATIENCE = 2.0  # seconds

Result = TypeVar("Result")


def compiled_here(launch: Callable[[], Result], name: str) -> Result:
    """The result of a launch that may compile `name`.

    Where the cache folder cannot be written, what it lacks is kept in a temporary folder of this
    process, and a line on standard error says so, once.
    """
    timer = threading.Timer(PATIENCE, _say, [f"compiling {name} for this GPU, once"])
    timer.daemon = True
    timer.start()
    try:
        try:
            return launch()
        except OSError as error:
            if not _is_in_cache(error):
                raise
            temporary = _temporary_cache(str(knobs.cache.dir), str(error.strerror))
            with knobs.cache.scope():
                knobs.cache.dir = temporary
                return launch()
    finally:
        timer.cancel()


def _say(text: str) -> None:
    print(f"flashdig: {text}", file=sys.stderr, flush=True)


def _is_in_cache(error: OSError) -> bool:
    """Whether `error` is about a file of Triton's cache."""
    return error.filename is not None and str(error.filename).startswith(str(knobs.cache.dir))


@functools.cache
def _temporary_cache(folder: str, reason: str) -> str:
    temporary = tempfile.mkdtemp(prefix="flashdig-triton-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    _say(
        f"cannot write Triton's cache folder {folder} ({reason}); new kernels are kept in "
        f"{temporary} until this process ends"
    )
    return temporary
