"""Issued bytes equal a simulation of the tile loops; the Triton article's numbers, corrected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdig.costs import l2
from flashdig.costs.traffic import (
    Traffic,
    compulsory,
    decode_issued,
    flash_backward_issued,
    tensor_bytes,
    tiles_per_program,
    transpose_copy,
    v1_issued,
    v1_surroundings,
    v2_issued,
    visited_tiles,
)
from flashdig.problem import AttentionProblem, Mask

# The Triton article: batch 10, 64 heads, seqlen 1024, head_dim 64, float32, tiles of 32
ARTICLE = AttentionProblem.dense(10, 64, 1024, 64, "float32")
# Its card, by its compute capability and results: 36 SMs, two blocks an SM, 4 MB of L2
RESIDENT, L2_BYTES = 72, 4_194_304


class Simulator:
    """Runs the loops of a tiled kernel over row numbers and counts the rows it touches."""

    def __init__(self, problem: AttentionProblem, block_m: int, block_n: int) -> None:
        self.problem, self.block_m, self.block_n = problem, block_m, block_n
        self.loaded = self.stored = 0

    def query_tiles(self) -> list[range]:
        return self._cut(self.problem.seqlen_q, self.block_m)

    def key_tiles(self) -> list[range]:
        return self._cut(self.problem.seqlen_k, self.block_n)

    @staticmethod
    def _cut(length: int, block: int) -> list[range]:
        return [range(start, min(start + block, length)) for start in range(0, length, block)]

    def visible(self, rows: range, keys: range) -> bool:
        mask = self.problem.mask
        offset = mask.offset(self.problem.seqlen_q, self.problem.seqlen_k)
        return any(
            (mask.window_left is None or j >= i + offset - mask.window_left)
            and (mask.window_right is None or j <= i + offset + mask.window_right)
            for i in rows
            for j in keys
        )

    def load(self, rows: range, row_bytes: int) -> None:
        self.loaded += len(rows) * row_bytes

    def store(self, rows: range, row_bytes: int) -> None:
        self.stored += len(rows) * row_bytes

    def v1(self, *, skip: bool, accumulator_bytes: int = 4) -> Traffic:
        p, size = self.problem, self.problem.element_bytes
        for _ in range(p.batch * p.num_heads):
            for keys in self.key_tiles():
                self.load(keys, p.head_dim * size)
                self.load(keys, p.head_dim_v * size)
                for rows in self.query_tiles():
                    if skip and not self.visible(rows, keys):
                        continue
                    self.load(rows, p.head_dim * size)
                    for move in (self.load, self.store):
                        move(rows, p.head_dim_v * accumulator_bytes)  # O
                        move(rows, 4)  # m
                        move(rows, 4)  # l
        return Traffic(self.loaded, self.stored)

    def v2(self, *, skip: bool) -> Traffic:
        p, size = self.problem, self.problem.element_bytes
        for rows in self.query_tiles() * (p.batch * p.num_heads):
            self.load(rows, p.head_dim * size)
            for keys in self.key_tiles():
                if skip and not self.visible(rows, keys):
                    continue
                self.load(keys, p.head_dim * size)
                self.load(keys, p.head_dim_v * size)
            self.store(rows, p.head_dim_v * size)
            self.store(rows, 4)  # LSE
        return Traffic(self.loaded, self.stored)

    def backward(self) -> Traffic:
        p, size = self.problem, self.problem.element_bytes
        heads = p.batch * p.num_heads
        for rows in self.query_tiles() * heads:  # delta
            self.load(rows, 2 * p.head_dim_v * size)
            self.store(rows, 4)
        for keys in self.key_tiles() * heads:
            self.load(keys, (p.head_dim + p.head_dim_v) * size)
            for rows in self.query_tiles():
                if not self.visible(rows, keys):
                    continue
                self.load(rows, (p.head_dim + p.head_dim_v) * size + 8)
                self.load(rows, p.head_dim * 4)  # dQ is added in float32
                self.store(rows, p.head_dim * 4)
            self.store(keys, (p.head_dim + p.head_dim_v) * size)
        for rows in self.query_tiles() * heads:  # dQ to the input's type
            self.load(rows, p.head_dim * 4)
            self.store(rows, p.head_dim * size)
        if p.group_size > 1:
            for keys in self.key_tiles() * heads:
                self.load(keys, (p.head_dim + p.head_dim_v) * size)
            for keys in self.key_tiles() * (p.batch * p.num_heads_kv):
                self.store(keys, (p.head_dim + p.head_dim_v) * size)
        return Traffic(self.loaded, self.stored)


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    group = draw(st.integers(1, 2))
    heads_kv = draw(st.integers(1, 2))
    return AttentionProblem(
        batch=draw(st.integers(1, 2)),
        num_heads=group * heads_kv,
        num_heads_kv=heads_kv,
        seqlen_q=draw(st.integers(0, 14)),
        seqlen_k=draw(st.integers(0, 14)),
        head_dim=draw(st.sampled_from([8, 16])),
        head_dim_v=draw(st.sampled_from([8, 16])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])),
        mask=draw(
            st.builds(
                Mask,
                st.none() | st.integers(0, 5),
                st.none() | st.integers(0, 5),
                st.sampled_from(["bottom-right", "top-left"]),
            )
        ),
    )


BLOCKS = st.sampled_from([1, 2, 3, 4, 8, 16])


@given(problem=problems(), block_m=BLOCKS, block_n=BLOCKS, skip=st.booleans())
def test_v1_equals_the_simulated_loops(problem, block_m, block_n, skip):
    formula = v1_issued(problem, block_m, block_n, skip_masked_tiles=skip)
    assert formula == Simulator(problem, block_m, block_n).v1(skip=skip)


@given(problem=problems(), block_m=BLOCKS, block_n=BLOCKS, skip=st.booleans())
def test_v2_equals_the_simulated_loops(problem, block_m, block_n, skip):
    formula = v2_issued(problem, block_m, block_n, skip_masked_tiles=skip)
    assert formula == Simulator(problem, block_m, block_n).v2(skip=skip)


@given(problem=problems(), block_m=BLOCKS, block_n=BLOCKS)
def test_the_backward_equals_the_simulated_loops(problem, block_m, block_n):
    formula = flash_backward_issued(problem, block_m, block_n)
    assert formula == Simulator(problem, block_m, block_n).backward()


@given(problem=problems(), block=BLOCKS)
def test_v2_never_asks_for_more_than_v1(problem, block):
    """Equal tiles and lengths: K and V again for each query tile weigh less than Q and a float32 O
    again for each key tile, at any element size up to 4 bytes."""
    square = problem.replace(seqlen_k=problem.seqlen_q, head_dim_v=problem.head_dim)
    first, second = v1_issued(square, block, block), v2_issued(square, block, block)
    assert second.load_bytes <= first.load_bytes
    assert second.store_bytes <= first.store_bytes
    room = {"cache_bytes": 256, "resident_programs": 2}
    first_left = l2.v1_expected(square, block, block, **room)
    second_left = l2.v2_expected(square, block, block, **room)
    assert second_left.total_bytes <= first_left.total_bytes


@given(problem=problems(), block_m=BLOCKS, block_n=BLOCKS)
def test_every_column_is_at_least_compulsory_where_everything_is_seen(problem, block_m, block_n):
    seen = problem.replace(mask=Mask(), seqlen_q=max(1, problem.seqlen_q))
    least = compulsory(seen)
    issued = v2_issued(seen, block_m, block_n)
    memory = l2.v2_expected(seen, block_m, block_n, cache_bytes=512, resident_programs=3)
    for column in (issued, memory):
        assert column.load_bytes >= least.load_bytes
        assert column.store_bytes >= least.store_bytes
    assert memory.load_bytes <= issued.load_bytes


@given(problem=problems(), block_m=BLOCKS, block_n=BLOCKS, resident=st.integers(1, 9))
def test_a_larger_cache_never_leaves_more_for_memory(problem, block_m, block_n, resident):
    for expected in (l2.v1_expected, l2.v2_expected, l2.backward_expected):
        left = [
            expected(
                problem, block_m, block_n, cache_bytes=cache, resident_programs=resident
            ).total_bytes
            for cache in (64, 1024, 1e9)
        ]
        assert left == sorted(left, reverse=True)


@given(problem=problems(), block_m=BLOCKS, block_n=BLOCKS)
def test_programs_add_up_to_the_visits(problem, block_m, block_n):
    for skip in (True, False):
        visits = visited_tiles(problem, block_m, block_n, skip_masked_tiles=skip)
        programs = tiles_per_program(problem, block_m, block_n, skip_masked_tiles=skip)
        assert sum(programs) == visits.tiles
    skipped = visited_tiles(problem, block_m, block_n, skip_masked_tiles=True)
    assert skipped.pairs >= problem.mask.visible_pairs(problem.seqlen_q, problem.seqlen_k)


def test_v1_of_the_article_reads_11_24_gb_and_stores_5_536():
    """The article models 10.6 GB by Q and O alone; l, m, K and V belong to it as well."""
    issued = v1_issued(ARTICLE, 32, 32)
    query_and_output = 640 * 32 * 1024 * 64 * 4 * 2
    assert query_and_output == 10_737_418_240  # 10.7 GB
    statistics, keys = 640 * 32 * 1024 * 8, 640 * 1024 * 64 * 4 * 2
    assert issued.load_bytes == query_and_output + statistics + keys == 11_240_734_720
    assert issued.store_bytes == 5_536_481_280


def test_v2_of_the_article_still_asks_for_10_9_gb():
    issued = v2_issued(ARTICLE, 32, 32)
    assert issued.load_bytes == 10_905_190_400
    assert issued.load_bytes / v1_issued(ARTICLE, 32, 32).load_bytes > 0.97


def test_the_articles_412_mb_are_below_what_must_be_read():
    least = compulsory(ARTICLE)
    assert least.load_bytes == 503_316_480
    assert least.load_bytes > 412.18e6
    assert least.store_bytes == tensor_bytes(ARTICLE).o + 640 * 1024 * 4


def test_only_the_cache_explains_the_drop():
    """Behind 4 MB of L2: v1 keeps nearly all of its traffic, v2 falls to the compulsory bytes."""
    setting = {"cache_bytes": L2_BYTES, "resident_programs": RESIDENT}
    first = l2.v1_expected(ARTICLE, 32, 32, **setting)
    second = l2.v2_expected(ARTICLE, 32, 32, **setting)
    assert first.load_bytes == pytest.approx(11.58e9, rel=0.05)  # measured there
    assert first.store_bytes == pytest.approx(5.54e9, rel=0.01)  # measured there
    assert l2.v1_working_set(ARTICLE, RESIDENT) > 9 * L2_BYTES
    assert l2.v2_working_set(ARTICLE, 32, RESIDENT) < L2_BYTES
    assert second.load_bytes == compulsory(ARTICLE).load_bytes
    assert 1 - second.load_bytes / first.load_bytes == pytest.approx(0.955, abs=0.002)


def test_the_articles_own_percentages_do_not_follow_from_its_numbers():
    """It says 92.98 % less and 145 % faster."""
    fewer_bytes, times_as_fast = 1 - 412.18e6 / 11.58e9, 156.44 / 34
    assert fewer_bytes == pytest.approx(0.964, abs=0.0005)
    assert times_as_fast == pytest.approx(4.6, abs=0.01)


def test_the_tile_formula_of_the_article():
    assert (2 * 32 + 3 * 32 * 64 + 32 * 32) * 4 == 28_928


def test_the_score_matrix_of_the_cutlass_article():
    """N 4096 in float32: 64 x 1024 x 1024 bytes a head, 128 times that for batch 8 x 16 heads."""
    head = 4096 * 4096 * 4
    assert head == 67_108_864
    assert 8 * 16 * head == 8_589_934_592


def test_hidden_tiles_of_a_causal_mask_are_skipped():
    problem = AttentionProblem.dense(1, 1, 1024, 64, causal=True)
    every = visited_tiles(problem, 64, 64, skip_masked_tiles=False)
    seen = visited_tiles(problem, 64, 64, skip_masked_tiles=True)
    assert (every.tiles, seen.tiles) == (256, 136)  # n (n + 1) / 2 of n x n: about half
    assert tiles_per_program(problem, 64, 64) == list(range(1, 17))


def test_what_runs_around_the_kernels():
    half = AttentionProblem.dense(1, 2, 8, 16, "bfloat16")
    single = half.replace(dtype="float32")
    assert v1_surroundings(single) == Traffic(0, 2 * 8 * 16 * 4 + 2 * 2 * 8 * 4)
    assert v1_surroundings(half) == v1_surroundings(single) + Traffic(
        2 * 8 * 16 * 4, 2 * 8 * 16 * 2
    )
    assert transpose_copy(half) == Traffic(512, 512)


def test_statistics_of_v2():
    bare = v2_issued(ARTICLE, 32, 32, statistics="none")
    rows = 640 * 1024 * 4
    assert v2_issued(ARTICLE, 32, 32).store_bytes == bare.store_bytes + rows
    assert v2_issued(ARTICLE, 32, 32, statistics="m_and_l").store_bytes == (
        bare.store_bytes + 2 * rows
    )


def test_decode_reads_each_kv_head_once():
    problem = AttentionProblem.dense(1, 32, 1, 128, num_heads_kv=8, seqlen_k=65536)
    size = tensor_bytes(problem)
    assert size.k + size.v == 2 * 65536 * 8 * 128 * 2
    alone = decode_issued(problem)
    assert alone.load_bytes == compulsory(problem).load_bytes
    split = decode_issued(problem, 16)
    partial = 16 * 32 * 129 * 4
    assert split.load_bytes == alone.load_bytes + 15 * size.q + partial
    assert split.store_bytes == alone.store_bytes + partial
    with pytest.raises(ValueError, match="splits must be >= 1"):
        decode_issued(problem, 0)


def test_the_backwards_compulsory_bytes():
    problem = AttentionProblem.dense(1, 2, 8, 16)
    tensor = 2 * 8 * 16 * 2
    assert compulsory(problem, "backward") == Traffic(5 * tensor + 2 * 8 * 4, 3 * tensor)


def test_blocks_must_be_positive():
    with pytest.raises(ValueError, match="block_m and block_n must be >= 1, got 0 and 32"):
        v2_issued(ARTICLE, 0, 32)
