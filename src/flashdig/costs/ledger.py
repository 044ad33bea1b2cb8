"""The bytes of a prediction by tensor: which of Q, K, V, S, P, O, m, l a rung moves how often.

For each tensor the three columns of `traffic`: compulsory, issued, and expected at memory. They add
up to those of the prediction, but for a byte of rounding a tensor in the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flashdig.costs import l2
from flashdig.costs.predict_unfused import unfused_kernels
from flashdig.costs.prediction import Prediction
from flashdig.costs.schedules import SCHEDULES, Tile, tile_of
from flashdig.costs.traffic import (
    FLOAT32_BYTES,
    Traffic,
    tensor_bytes,
    visited_tiles,
)
from flashdig.costs.unfused import Kernel
from flashdig.hardware.devices import Device

# in the order of the loop; "mask" is the mask that eager attention builds or reads
TENSORS = ("Q", "K", "V", "S", "P", "O", "m", "l", "LSE", "mask")
NOTHING = Traffic(0, 0)


@dataclass
class TensorTraffic:
    """Bytes of one tensor."""

    compulsory: Traffic = NOTHING
    issued: Traffic = NOTHING
    memory: Traffic = NOTHING


@dataclass
class _Ledger:
    entries: dict[str, TensorTraffic] = field(default_factory=dict)

    def add(self, tensor: str, issued: Traffic, memory: Traffic) -> None:
        entry = self.entries.setdefault(tensor, TensorTraffic())
        entry.issued += issued
        entry.memory += memory

    def load(self, tensor: str, issued: int, memory: int | None = None) -> None:
        self.add(tensor, Traffic(issued, 0), Traffic(issued if memory is None else memory, 0))

    def store(self, tensor: str, issued: int, memory: int | None = None) -> None:
        self.add(tensor, Traffic(0, issued), Traffic(0, issued if memory is None else memory))


def ledger(guess: Prediction, device: Device) -> dict[str, TensorTraffic]:
    """Tensor -> its bytes, in the order of TENSORS; tensors that are not moved are left out.

    Args:
        guess: of a forward.
        device: the one that the guess is for.

    Raises ValueError for another direction than "forward".
    """
    if guess.direction != "forward":
        raise ValueError(f"guess must be of a forward, got {guess.direction!r}")
    book = _Ledger()
    schedule = SCHEDULES[guess.generation]
    if schedule.loops == "unfused":
        for kernel in unfused_kernels(guess.generation, guess.problem):
            _add_kernel(book, kernel, guess, device.cache_bytes)
    elif schedule.loops == "keys outside":
        _add_keys_outside(book, guess, tile_of(schedule, guess.problem), device.cache_bytes)
    else:
        _add_queries_outside(book, guess, tile_of(schedule, guess.problem), device.cache_bytes)
    size = tensor_bytes(guess.problem)
    for tensor, amount in (("Q", size.q), ("K", size.k), ("V", size.v)):
        book.add(tensor, NOTHING, NOTHING)
        book.entries[tensor].compulsory = Traffic(amount, 0)
    book.add("O", NOTHING, NOTHING)
    book.entries["O"].compulsory = Traffic(0, size.o)
    lse = guess.compulsory.store_bytes - size.o
    if lse:
        book.add("LSE", NOTHING, NOTHING)
        book.entries["LSE"].compulsory = Traffic(0, lse)
    return {tensor: book.entries[tensor] for tensor in TENSORS if tensor in book.entries}


def _resident_programs(guess: Prediction) -> int:
    return round(guess.programs / guess.waves) if guess.programs and guess.waves else 1


def _add_keys_outside(book: _Ledger, guess: Prediction, tile: Tile, cache_bytes: float) -> None:
    """FlashAttention's kernel, and the fills and the rounding around it."""
    problem = guess.problem
    visits = visited_tiles(problem, tile.block_m, tile.block_n, skip_masked_tiles=False)
    heads = problem.batch * problem.num_heads
    rows = heads * problem.seqlen_q
    size = problem.element_bytes
    missing = l2.miss_fraction(l2.v1_working_set(problem, _resident_programs(guess)), cache_bytes)

    def again(first: int, issued: int) -> tuple[int, int]:
        """(issued, at memory) of what is touched once in all and then again."""
        return issued, first + math.ceil((issued - first) * missing)

    def swept(row_bytes: int) -> tuple[int, int]:
        """Rows of queries, which every tile of keys touches."""
        return again(rows * row_bytes, heads * visits.query_rows * row_bytes)

    once = tensor_bytes(problem)
    book.load("Q", *swept(problem.head_dim * size))
    # grouped heads: each query head loads them
    book.load("K", *again(once.k, once.k * problem.group_size))
    book.load("V", *again(once.v, once.v * problem.group_size))
    accumulated = problem.head_dim_v * FLOAT32_BYTES
    for tensor, row_bytes in (("O", accumulated), ("m", FLOAT32_BYTES), ("l", FLOAT32_BYTES)):
        book.load(tensor, *swept(row_bytes))
        book.store(tensor, *swept(row_bytes))
        book.store(tensor, rows * row_bytes)  # the fill before
    if size < FLOAT32_BYTES:
        book.load("O", rows * accumulated)
        book.store("O", once.o)


def _add_queries_outside(book: _Ledger, guess: Prediction, tile: Tile, cache_bytes: float) -> None:
    """FlashAttention-2's kernel, and the copy of K before it where there is one."""
    problem = guess.problem
    size = tensor_bytes(problem)
    visits = visited_tiles(problem, tile.block_m, tile.block_n, skip_masked_tiles=True)
    heads = problem.batch * problem.num_heads
    at_memory = l2.v2_expected(
        problem,
        tile.block_m,
        tile.block_n,
        cache_bytes=cache_bytes,
        resident_programs=_resident_programs(guess),
    )
    keys_and_values = at_memory.load_bytes - size.q
    book.load("Q", size.q)
    for tensor, head_dim in (("K", problem.head_dim), ("V", problem.head_dim_v)):
        issued = heads * visits.key_rows * head_dim * problem.element_bytes
        share = head_dim / (problem.head_dim + problem.head_dim_v)
        book.load(tensor, issued, round(keys_and_values * share))
    book.store("O", size.o)
    book.store("LSE", size.lse)
    if guess.generation == "v2_transposed":
        book.load("K", size.k)
        book.store("K", size.k)


# kernels of unfused attention that read and write one tensor
_OF_ONE_TENSOR = {
    "scale": "S",
    "copy of the scores": "S",
    "isneginf": "P",
    "any row hidden": "P",
    "where (hidden rows to 0)": "P",
    "cast the weights": "P",
    "cast q": "Q",
    "scale q": "Q",
    "cast k": "K",
    "scale k": "K",
    "repeat k": "K",
    "cast v": "V",
    "repeat v": "V",
    "cast o": "O",
    "ones": "mask",
    "tril": "mask",
    "where (mask to bias)": "mask",
    "fill a scalar": "mask",
}


def _add_kernel(book: _Ledger, kernel: Kernel, guess: Prediction, cache_bytes: float) -> None:
    """One kernel of unfused attention; what it finds in the cache is what the one before wrote."""
    found = kernel.load_bytes - kernel.expected(cache_bytes).load_bytes
    other = kernel.load_bytes - kernel.from_previous_bytes
    if kernel.name == "matmul QK^T":
        seqlen_q, seqlen_k = guess.problem.seqlen_q, guess.problem.seqlen_k
        queries = kernel.load_bytes * seqlen_q // (seqlen_q + seqlen_k)
        book.load("Q", queries)
        book.load("K", kernel.load_bytes - queries)
        book.store("S", kernel.store_bytes)
    elif kernel.name == "matmul PV":
        book.load("P", kernel.from_previous_bytes, kernel.from_previous_bytes - found)
        book.load("V", other)
        book.store("O", kernel.store_bytes)
    elif kernel.name in ("masked_fill", "add the bias"):
        book.load("S", kernel.from_previous_bytes, kernel.from_previous_bytes - found)
        book.load("mask", other)
        book.store("S", kernel.store_bytes)
    elif kernel.name == "softmax":
        book.load("S", kernel.load_bytes, kernel.load_bytes - found)
        book.store("P", kernel.store_bytes)
    elif kernel.name == "online softmax":
        lse = tensor_bytes(guess.problem).lse
        book.load("S", kernel.issued.load_bytes, kernel.load_bytes - found)
        book.store("P", kernel.store_bytes - lse)
        book.store("LSE", lse)
    else:
        tensor = _OF_ONE_TENSOR[kernel.name]
        book.load(tensor, kernel.issued.load_bytes, kernel.load_bytes - found)
        book.store(tensor, kernel.store_bytes)
