"""From tensors to the launches of the Hopper backward: descriptors, padded buffers, grids."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from flashdig.kernels.gluon_api import gl
from flashdig.kernels.hopper.backward_dq import flashdig_hopper_backward_dq
from flashdig.kernels.hopper.backward_main import flashdig_hopper_backward
from flashdig.kernels.hopper.backward_pre_post import (
    flashdig_hopper_backward_postprocess,
    flashdig_hopper_backward_preprocess,
)
from flashdig.kernels.hopper.backward_tiles import (
    TILES,
    DQTile,
    MainTile,
    dq_tile,
    keys_are_few,
    main_tile,
)
from flashdig.kernels.hopper.backward_wide import flashdig_hopper_backward_wide
from flashdig.kernels.hopper.chip import heads_together, multiprocessors
from flashdig.kernels.hopper.descriptors import tiles_of
from flashdig.kernels.launch import Launch, Tiles, allocation
from flashdig.kernels.replay import Steps
from flashdig.kernels.triton.arguments import LOG2_E, check_grid

BLOCK_N = 128
# row statistics are padded to whole tiles of every kernel
PADDED_ROWS = 128
# 16-bit elements in 16 bytes: strides are multiples of it
UNIT = 8
# widths of the kernel of `backward_wide`, whose tiles have 64 rows and 64 keys
WIDE = (256,)
PREPROCESS_ROWS = 32
COUNTER = 4  # numbers, of which two are used: what follows stays aligned


@dataclass(frozen=True)
class Call:
    """One call. Dense, every row sees a key and every key is seen by a row; packed, the kernels
    cut off what does not.

    Attributes:
        grad_out, q, k, v, out: dense (batch, seqlen, heads, head_dim) or packed (total, heads,
            head_dim), float16 or bfloat16, head_dim and head_dim_v at most 256 and multiples of 8,
            strides and addresses that TMA can take; no size is zero.
        lse: (batch, num_heads, seqlen_q) or (num_heads, total_q), float32, contiguous; grad_lse:
            the same shape, or None.
        cu_seqlens_q to seqused_k: of packed input; the last two may be None.
        softmax_scale: above zero.
        window_left, window_right: keys seen on each side of the diagonal; -1 is unlimited.
        offset: key position that lies on the diagonal of query row 0; of dense input.
        top_left: of packed input: that position is 0 in every sequence.
    """

    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    alibi_slopes: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float
    softcap: float
    window_left: int
    window_right: int
    offset: int = 0
    top_left: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.shape[0] - 1
        return self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[-3]

    @property
    def seqlen_k(self) -> int:
        return self.k.shape[-3]

    @property
    def width(self) -> int:
        """The head_dim that the kernels are compiled for."""
        wider = max(self.q.shape[-1], self.v.shape[-1])
        return next(width for width in TILES if wider <= width)

    @property
    def group_size(self) -> int:
        return self.q.shape[-2] // self.k.shape[-2]

    def slots(self, seqlen: int, block: int) -> int:
        """Tiles of a head: of one sequence, or of a packed tensor, wherever sequences begin."""
        return seqlen // block + self.batch if self.packed else triton.cdiv(seqlen, block)

    def programs(self, seqlen: int, block: int, heads: int) -> int:
        return check_grid(self.slots(seqlen, block) * heads * (1 if self.packed else self.batch))

    @property
    def padded_q(self) -> int:
        """Rows of a head in padded buffers."""
        return self.slots(self.seqlen_q, PADDED_ROWS) * PADDED_ROWS

    @property
    def padded_shape(self) -> tuple[int, ...]:
        heads = self.q.shape[-2] * (1 if self.packed else self.batch)
        return heads, self.padded_q

    def together(self, heads: int, head_bytes: int) -> int:
        """Heads that are walked side by side: with a causal mask, those that L2 holds."""
        causal = self.window_right >= 0
        return heads_together(heads, head_bytes, causal=causal, packed=self.packed)

    @property
    def uneven(self) -> bool:
        """Some tiles of keys are seen by more rows than others: blocks count them out."""
        causal = self.window_right >= 0 and self.window_left < 0
        return self.width not in WIDE and (causal or self.packed)

    @property
    def rows_met(self) -> int:
        """Rows that the first tile of keys meets; of packed input, on average."""
        rows = self.seqlen_q // (self.batch if self.packed else 1)
        if self.window_left >= 0 and self.window_right >= 0:
            rows = min(rows, self.window_left + self.window_right + BLOCK_N)
        return rows * self.group_size

    @property
    def few_keys(self) -> bool:
        """Keys are so few that dQ is faster made apart."""
        if self.packed or self.window_left >= 0:
            return False
        return keys_are_few(self.width, self.seqlen_k, causal=self.window_right >= 0)

    @property
    def scaled(self) -> bool:
        """Scores are more than scaled products."""
        return self.softcap > 0.0 or self.alibi_slopes is not None

    def lengths(self) -> tuple[torch.Tensor | None, ...]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k

    def numbers(self, together: int) -> tuple[Any, ...]:
        """The numbers that the kernels of a walk take, in their order."""
        slopes = self.alibi_slopes
        factor = self.softmax_scale / self.softcap if self.softcap > 0.0 else self.softmax_scale
        return (
            self.batch,
            self.q.shape[-2],
            self.group_size,
            self.seqlen_q,
            self.seqlen_k,
            self.padded_q,
            self.offset,
            together,
            max(self.window_left, 0),
            max(self.window_right, 0),
            factor,
            LOG2_E if self.scaled else self.softmax_scale * LOG2_E,
            self.softcap,
            self.softmax_scale,
            slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        )

    def row_numbers(self) -> tuple[int, ...]:
        """The numbers that the kernels before and after take, in their order."""
        return (
            self.batch,
            self.q.shape[-2],
            self.seqlen_q,
            self.seqlen_k,
            self.padded_q,
            max(self.window_left, 0),
            max(self.window_right, 0),
        )

    def constants(self) -> dict[str, Any]:
        return {
            "HEAD_DIM": self.width,
            "PACKED": self.packed,
            "TOP_LEFT": self.packed and self.top_left,
            "LEFT": self.window_left >= 0,
            "RIGHT": self.window_right >= 0,
        }

    def strides(self, x: torch.Tensor) -> tuple[int, ...]:
        """Those of (batch, row, head), in units."""
        batch = x.stride(0) if x.dim() == 4 else 0
        return batch // UNIT, x.stride(-3) // UNIT, x.stride(-2) // UNIT


def hopper_backward(
    call: Call,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    delta: torch.Tensor | None = None,
    *,
    dq_apart: bool | None = None,
    tiles: MainTile | None = None,
    dq_tiles: DQTile | None = None,
) -> None:
    """Write the gradients of a call.

    Args:
        dq, dk, dv: as q, k and v, with strides that TMA can take; None is not wanted. dk and dv
            are wanted together.
        delta: as lse, contiguous: rowsum(dO * O) - dLSE of live rows is written there.
        dq_apart: dQ comes from a kernel of its own: the same bits in every run; None, where that is
            faster.
        tiles, dq_tiles: others than those of `backward_tiles`.
    """
    launches = Launches(call, dq, dk, dv, dq_apart=dq_apart, tiles=tiles, dq_tiles=dq_tiles)
    launches(
        call.grad_out,
        call.grad_lse,
        call.q,
        call.k,
        call.v,
        call.alibi_slopes,
        call.lengths(),
        call.out,
        call.lse,
        dq,
        dk,
        dv,
        delta,
    )


class Launches:
    """The launches of one kind of call; called with tensors of the same shapes, strides and
    alignment, they write the gradients.

    Args: those of `hopper_backward`; of dq, dk and dv only the strides are looked at.
    """

    def __init__(
        self,
        call: Call,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
        *,
        dq_apart: bool | None = None,
        tiles: MainTile | None = None,
        dq_tiles: DQTile | None = None,
    ) -> None:
        device = call.q.device
        apart = call.few_keys if dq_apart is None else dq_apart
        with_sums = dq is not None and dk is not None and not apart
        tiles = tiles or main_tile(
            call.width,
            call.rows_met,
            with_sums=with_sums,
            scaled=call.scaled,
            causal=call.window_right >= 0,
        )
        # log-sum-exp in units of log2, and delta, padded; the number of the next tile of keys; sums
        # of dQ; the last two start as zeros. One buffer, since allocating costs the host more than
        # its part of a launch
        rows = math.prod(call.padded_shape)
        self._sizes = [rows, rows, COUNTER, *([rows * call.width] if with_sums else [])]
        self._counted = call.uneven
        self.make_buffer = allocation((sum(self._sizes),), torch.float32, device)
        self._preprocess = _preprocess(call)
        self._main = self._dq = self._postprocess = None
        if dk is not None and dv is not None:
            self._main = _main(call, with_sums, dk, dv, tiles)
        if dq is not None and with_sums:
            self._postprocess = _postprocess(call, dq, tiles[0])
        elif dq is not None:
            dq_tiles = dq_tiles or dq_tile(call.width, few_keys=call.few_keys)
            self._dq = _dq(call, dq, dq_tiles, early=self._main is not None)

    def __call__(self, *tensors: Any) -> None:
        for launch, arguments in self.steps(self.make_buffer(), *tensors):
            launch(*arguments)

    def steps(
        self,
        buffer: torch.Tensor,
        grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        lengths: Sequence[torch.Tensor | None],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
        delta: torch.Tensor | None = None,
    ) -> Steps:
        """Each launch with its tensors; the buffer is of `make_buffer`."""
        lse_log2, delta_padded, number, *rest = buffer.split(self._sizes)
        counter = number.view(torch.int32) if self._counted else None
        sums = rest[0] if rest else None
        read = (lse_log2, delta_padded)
        before = (out, grad_out, lse, grad_lse, *read, delta, sums, counter, *lengths)
        steps: Steps = [(self._preprocess, before)]
        if self._main is not None:
            walked = (q, grad_out, k, v, dk, dv, *read, sums, alibi_slopes, *lengths, counter)
            steps.append((self._main, walked))
        if self._dq is not None:
            walked = (q, grad_out, k, v, dq, *read, alibi_slopes, *lengths, counter)
            steps.append((self._dq, walked))
        if self._postprocess is not None:
            steps.append((self._postprocess, (sums, dq, *lengths)))
        return steps


def _preprocess(call: Call) -> Launch:
    heads, padded_q = call.padded_shape
    dlse = call.grad_lse
    dlse_strides = (0, 0, 0) if dlse is None else (0, *dlse.stride())[-3:]
    rows = PADDED_ROWS if call.packed else PREPROCESS_ROWS
    strides = (*call.strides(call.out), *call.strides(call.grad_out), *dlse_strides)
    return _launch(
        flashdig_hopper_backward_preprocess,
        check_grid(padded_q // rows * heads),
        (*strides, *call.row_numbers()),
        constants={
            "HEAD_DIM_V": call.v.shape[-1],
            "BLOCK_DV": triton.next_power_of_2(call.v.shape[-1]),
            "UNIT": UNIT,
            "BLOCK_M": rows,
            **call.constants(),
        },
        num_warps=rows // 16 if call.packed else 4,
    )


def _main(
    call: Call,
    with_sums: bool,
    dk: torch.Tensor,
    dv: torch.Tensor,
    tiles: MainTile,
) -> Launch:
    block_m, stages, ahead, late, key_tiles = tiles
    wide = call.width in WIDE
    # `backward_long` makes dQ too
    long = with_sums and key_tiles == 1 and call.window_right < 0
    block_n = 64 if wide else BLOCK_N
    columns = call.width if wide or long else 64  # of gradients that leave at once
    num_heads_kv = call.k.shape[-2]
    row_bytes = call.width * (2 * call.q.element_size() + (4 if with_sums else 0))
    head_bytes = call.seqlen_q * row_bytes * call.group_size
    programs = call.programs(call.seqlen_k, block_n, num_heads_kv)
    if not wide:  # blocks walk several tiles of keys
        programs = min(programs, multiprocessors(call.q.device))
        # K, V and their gradients pass through L2 too
        head_bytes += call.seqlen_k * call.width * 4 * call.q.element_size()
    statistics = _statistics(call, block_m)
    return _launch(
        flashdig_hopper_backward_wide if wide else flashdig_hopper_backward,
        programs,
        call.numbers(call.together(call.batch * num_heads_kv, head_bytes)),
        tiles={
            "q_desc": _tiles(call.q, block_m, call.width),
            "dout_desc": _tiles(call.grad_out, block_m, call.width),
            "k_desc": _tiles(call.k, block_n, call.width),
            "v_desc": _tiles(call.v, block_n, call.width),
            "dk_desc": _tiles(dk, 64, columns),
            "dv_desc": _tiles(dv, 64, columns),
            "lse_desc": statistics,
            "delta_desc": statistics,
        },
        constants={
            "STAGES": stages,
            "SOFTCAP": call.softcap > 0.0,
            "WITH_DQ": with_sums,
            **({} if wide else {"BLOCK_M": block_m, "AHEAD": ahead, "LATE": late and with_sums}),
            **({} if wide else {"COUNTED": call.uneven, "KEY_TILES": key_tiles, "LONG": long}),
            **call.constants(),
        },
        num_warps=4,
        early=True,
    )


def _dq(call: Call, dq: torch.Tensor, tiles: DQTile, *, early: bool) -> Launch:
    block_n, stages, stages_v, slots = tiles
    num_heads = call.q.shape[-2]
    head_bytes = 2 * call.seqlen_k * call.width * call.k.element_size()
    programs = call.programs(call.seqlen_q, 128, num_heads)
    if slots == 2:  # blocks make several tiles of rows
        programs = min(programs, multiprocessors(call.q.device))
    statistics = _statistics(call, 64)
    return _launch(
        flashdig_hopper_backward_dq,
        programs,
        call.numbers(call.together(call.batch * num_heads, head_bytes)),
        tiles={
            "q_desc": _tiles(call.q, 64, call.width),
            "dout_desc": _tiles(call.grad_out, 64, call.width),
            "k_desc": _tiles(call.k, block_n, call.width),
            "v_desc": _tiles(call.v, block_n, call.width),
            "dq_desc": _tiles(dq, 64, call.width),
            "lse_desc": statistics,
            "delta_desc": statistics,
        },
        constants={
            "BLOCK_N": block_n,
            "STAGES": stages,
            "STAGES_V": stages_v,
            "SLOTS": slots,
            "COUNTED": call.uneven,
            "SOFTCAP": call.softcap > 0.0,
            **call.constants(),
        },
        num_warps=4,
        early=early,
    )


def _postprocess(call: Call, dq: torch.Tensor, block_m: int) -> Launch:
    rows = PADDED_ROWS if call.packed else block_m
    return _launch(
        flashdig_hopper_backward_postprocess,
        call.programs(call.seqlen_q, rows, call.q.shape[-2]),
        (*call.strides(dq), *call.row_numbers(), call.softmax_scale),
        constants={
            "COLUMNS_OF_DQ": dq.shape[-1],
            "BLOCK_M": block_m,
            "UNIT": UNIT,
            **call.constants(),
        },
        num_warps=4,
        early=True,
    )


def _launch(
    kernel: Any,
    programs: int,
    numbers: Sequence[Any],
    *,
    constants: dict[str, Any],
    num_warps: int,
    tiles: dict[str, Tiles] | None = None,
    early: bool = False,
) -> Launch:
    """A launch whose numbers stand, in the kernel's order, between its tensors and constants.

    early: it begins while the one before it ends, and waits for that itself.
    """
    names = [name for name in kernel.arg_names if name not in constants][-len(numbers) :]
    named = {**dict(zip(names, numbers, strict=True)), **constants}
    options = {"launch_pdl": True} if early else {}
    return Launch(kernel, programs, named, tiles, num_warps=num_warps, **options)


def _tiles(x: torch.Tensor, rows: int, width: int) -> Tiles:
    """What copies tiles of rows of one head; columns past the last arrive as zeros and are not
    written."""
    (tile, *_) = tiles_of("x", x, rows).values()
    block = (*tile.block[:-1], width)
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    return dataclasses.replace(tile, block=block, layout=layout)


def _statistics(call: Call, rows: int) -> Tiles:
    """What copies one number a row, padded to whole tiles."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    heads, padded_q = call.padded_shape
    return Tiles((heads * padded_q,), (1,), (rows,), layout)
