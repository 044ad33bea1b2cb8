"""The peers: torch's fused attention by each backend, FlashAttention-3 and -4, FlexAttention.

`reason_against` holds what an implementation documents; beyond that the call itself decides, and
its error is what the record shows. In front of FlashAttention-3 and -4 stand only their own
arguments: a wheel without a backward, or without softcap, raises or fails the gate.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashdig.bench.cell_inputs import CellInputs
from flashdig.bench.cells import Cell
from flashdig.bench.competitors import Attention, Competitor, Prepared
from flashdig.problem import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

HALF = ("float16", "bfloat16")
# an attention mask as a tensor, up to which it is worth making
DENSE_MASK_BYTES = 8 * 2**30


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """(batch, seqlen, heads, head_dim) to (batch, heads, seqlen, head_dim), contiguous."""
    return x.transpose(1, 2).contiguous()


def _transposed(attention: Attention, inputs: CellInputs) -> Prepared:
    """An attention in torch's layout, (batch, heads, seqlen, head_dim)."""
    return Prepared(
        attention=attention,
        tensors=(_by_head(inputs.q), _by_head(inputs.k), _by_head(inputs.v)),
        dout=None if inputs.dout is None else _by_head(inputs.dout),
        to_common=lambda x: x.transpose(1, 2),
    )


def _features(cell: Cell) -> dict[str, bool]:
    """What a cell asks for beside plain and causal attention, in words."""
    return {
        "packed input": cell.packed,
        "window": cell.window is not None,
        "softcap": cell.softcap > 0,
        "ALiBi": cell.alibi,
        "bias": cell.bias != "none",
        "sinks": cell.sinks,
        "dropout": cell.dropout_p > 0,
    }


def _no(cell: Cell, *features: str) -> str | None:
    missing = [name for name, asked in _features(cell).items() if asked and name in features]
    return f"no {', no '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Sdpa:
    """scaled_dot_product_attention held to one backend.

    ALiBi, bias and windows go in as a mask tensor where the backend takes one.
    """

    name: str
    backend: str
    takes_mask: bool
    cuda_dtypes: tuple[str, ...]
    on_cpu: bool

    def reason_against(self, cell: Cell, device_type: str) -> str | None:
        if device_type == "cpu" and not self.on_cpu:
            return "needs a CUDA device"
        if cell.fp8:
            return "no descale factors"
        if device_type == "cuda" and cell.dtype not in self.cuda_dtypes:
            return f"dtype must be {' or '.join(self.cuda_dtypes)}"
        reason = _no(cell, "packed input", "softcap", "sinks")
        if reason is None and not self.takes_mask:
            reason = _no(cell, "window", "ALiBi", "bias")
        if reason is None and _needs_mask(cell):
            nbytes = _mask_bytes(cell)
            if nbytes > DENSE_MASK_BYTES:
                reason = f"needs a mask tensor of {nbytes / 2**30:.0f} GiB"
        return reason

    def prepare(self, inputs: CellInputs) -> Prepared:
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        cell = inputs.cell
        backend = getattr(SDPBackend, self.backend)
        mask = dense_mask(inputs) if _needs_mask(cell) else None
        causal = bool(cell.causal) and mask is None
        shared = cell.num_heads != cell.num_heads_kv

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask,
                    dropout_p=cell.dropout_p,
                    is_causal=causal,
                    enable_gqa=shared,
                )

        return _transposed(attention, inputs)


def _needs_mask(cell: Cell) -> bool:
    """Whether torch's is_causal cannot say all that hides or changes scores."""
    if cell.window is not None or cell.alibi or cell.bias != "none":
        return True
    square = cell.seqlen_q == cell.seqlen_k
    return bool(cell.causal) and not square and cell.causal != "top-left"


def _mask_bytes(cell: Cell) -> int:
    of_heads = cell.num_heads if cell.alibi or cell.bias == "float" else 1
    element = DTYPE_BYTES[cell.dtype] if of_heads > 1 else 1
    return of_heads * cell.seqlen_q * cell.seqlen_k * element


def dense_mask(inputs: CellInputs) -> torch.Tensor:
    """All that hides or changes scores in one tensor for `attn_mask`: bool (1, 1, seqlen_q,
    seqlen_k), or with ALiBi or a float bias (1, num_heads, seqlen_q, seqlen_k) in q's dtype."""
    import torch

    cell, mask = inputs.cell, inputs.cell.mask
    device = inputs.q.device
    # int32: for 32k tokens the int64 distances alone would be 8 GiB
    i = torch.arange(cell.seqlen_q, dtype=torch.int32, device=device)[:, None]
    j = torch.arange(cell.seqlen_k, dtype=torch.int32, device=device)
    distance = (j - i - mask.offset(cell.seqlen_q, cell.seqlen_k))[None, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if mask.window_left is not None:
        visible &= distance >= -mask.window_left
    if mask.window_right is not None:
        visible &= distance <= mask.window_right
    added: torch.Tensor | None = None
    if inputs.bias is not None and inputs.bias.dtype == torch.bool:
        visible &= inputs.bias
    elif inputs.bias is not None:
        added = inputs.bias
    if inputs.alibi_slopes is not None:
        # rounded once, after the product
        alibi = (-inputs.alibi_slopes[:, None, None] * distance[0].abs())[None].to(inputs.q.dtype)
        added = alibi if added is None else added + alibi
    return visible if added is None else added.masked_fill(~visible, -math.inf)


@dataclass(frozen=True)
class SdpaFlash:
    """torch's FlashAttention-2: through scaled_dot_product_attention where that serves, else
    (packed input, windows) through the operator beneath, `aten::_flash_attention_forward`."""

    name: str = "sdpa_flash"

    def _plain(self) -> Sdpa:
        return Sdpa(self.name, "FLASH_ATTENTION", takes_mask=False, cuda_dtypes=HALF, on_cpu=True)

    def _by_operator(self, cell: Cell) -> bool:
        if cell.packed or cell.window is not None:
            return True
        return _needs_mask(cell) and not cell.alibi and cell.bias == "none"

    def reason_against(self, cell: Cell, device_type: str) -> str | None:
        if not self._by_operator(cell):
            if device_type == "cpu" and cell.dropout_p > 0:
                return "no dropout on the CPU"
            return self._plain().reason_against(cell, device_type)
        if device_type == "cpu":
            return "packed input, windows and causal with unequal lengths need a CUDA device"
        if cell.dtype not in HALF:
            return f"dtype must be {' or '.join(HALF)}"
        if cell.causal == "top-left":
            return "its mask is aligned to the bottom right"
        if cell.head_dim != cell.head_dim_v:
            return "head_dim_v must equal head_dim"
        return _no(cell, "softcap", "ALiBi", "bias", "sinks")

    def prepare(self, inputs: CellInputs) -> Prepared:
        import torch

        cell = inputs.cell
        if not self._by_operator(cell):
            return self._plain().prepare(inputs)
        left, right = cell.mask.sides
        windowed = cell.window is not None

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.ops.aten._flash_attention_forward(
                q,
                k,
                v,
                inputs.cu_seqlens,
                inputs.cu_seqlens,
                cell.seqlen_q,
                cell.seqlen_k,
                cell.dropout_p,
                cell.mask.is_causal,
                False,
                window_size_left=left if windowed else None,
                window_size_right=right if windowed else None,
            )[0]
            return out

        return Prepared(attention, (inputs.q, inputs.k, inputs.v), inputs.dout)


@dataclass(frozen=True)
class FlashAttention:
    """FlashAttention-3 (`flash_attn_interface`) or -4 (`flash_attn.cute`), by their functions."""

    name: str
    module: str
    lacks: tuple[str, ...]
    unlimited: int | None
    dtypes: tuple[str, ...] = HALF

    def reason_against(self, cell: Cell, device_type: str) -> str | None:
        if device_type != "cuda":
            return "needs a CUDA device"
        problem = _import_problem(self.module)
        if problem is not None:
            return problem
        if cell.dtype not in self.dtypes:
            return f"dtype must be {' or '.join(self.dtypes)}"
        if cell.causal == "top-left":
            return "its mask is aligned to the bottom right"
        return _no(cell, *self.lacks)

    def prepare(self, inputs: CellInputs) -> Prepared:
        cell = inputs.cell
        module: Any = importlib.import_module(self.module)
        options: dict[str, Any] = {"causal": cell.mask.is_causal, **inputs.descales}
        if cell.window is not None:
            sides = (cell.mask.window_left, cell.mask.window_right)
            options["window_size"] = tuple(self.unlimited if s is None else s for s in sides)
        if cell.softcap > 0:
            options["softcap"] = cell.softcap
        if inputs.sinks is not None:
            options["learnable_sink"] = inputs.sinks.to(inputs.q.dtype)
        function = module.flash_attn_func
        if cell.packed:
            function = module.flash_attn_varlen_func
            options |= {
                "cu_seqlens_q": inputs.cu_seqlens,
                "cu_seqlens_k": inputs.cu_seqlens,
                "max_seqlen_q": cell.seqlen_q,
                "max_seqlen_k": cell.seqlen_k,
            }

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result = function(q, k, v, **options)
            out: torch.Tensor = result[0] if isinstance(result, tuple) else result
            return out

        return Prepared(attention, (inputs.q, inputs.k, inputs.v), inputs.dout)


@functools.cache
def _import_problem(module: str) -> str | None:
    """Why a peer's module cannot be had; asked once, since a failing import can take seconds."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"{module} is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # a compiled extension for another torch raises anything
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


@dataclass(frozen=True)
class Flex:
    """FlexAttention, compiled: Inductor's Triton templates. Masks are a block mask, softcap, ALiBi
    and bias a score_mod."""

    name: str = "flex"

    def reason_against(self, cell: Cell, device_type: str) -> str | None:
        if device_type != "cuda":
            return "compiled for CUDA devices only"
        if cell.causal and cell.seqlen_q > cell.seqlen_k:
            return "a block mask with rows that see no key"
        if cell.fp8:
            return "no descale factors"
        return _no(cell, "sinks", "dropout")

    def prepare(self, inputs: CellInputs) -> Prepared:
        from flashdig.bench.flex import block_mask, compiled_flex_attention, score_mod

        shared = inputs.cell.num_heads != inputs.cell.num_heads_kv
        options = {"score_mod": score_mod(inputs), "block_mask": block_mask(inputs)}
        flex = compiled_flex_attention()

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = flex(q, k, v, enable_gqa=shared, **options)
            return out

        if not inputs.cell.packed:
            return _transposed(attention, inputs)

        def one_batch(x: torch.Tensor) -> torch.Tensor:
            return _by_head(x[None])

        return Prepared(
            attention=attention,
            tensors=(one_batch(inputs.q), one_batch(inputs.k), one_batch(inputs.v)),
            dout=None if inputs.dout is None else one_batch(inputs.dout),
            to_common=lambda x: x[0].transpose(0, 1),
        )


_EVERY = ("float32", *HALF)
_MAKERS: dict[str, Callable[[], Competitor]] = {
    "sdpa_flash": SdpaFlash,
    "sdpa_cudnn": functools.partial(
        Sdpa, "sdpa_cudnn", "CUDNN_ATTENTION", takes_mask=True, cuda_dtypes=HALF, on_cpu=False
    ),
    "sdpa_efficient": functools.partial(
        Sdpa,
        "sdpa_efficient",
        "EFFICIENT_ATTENTION",
        takes_mask=True,
        cuda_dtypes=_EVERY,
        on_cpu=False,
    ),
    "sdpa_math": functools.partial(
        Sdpa,
        "sdpa_math",
        "MATH",
        takes_mask=True,
        cuda_dtypes=(*_EVERY, "float64"),
        on_cpu=True,
    ),
    "flex": Flex,
    "fa3": functools.partial(
        FlashAttention,
        "fa3",
        "flash_attn_interface",
        lacks=("ALiBi", "bias", "sinks", "dropout"),
        unlimited=-1,
        dtypes=(*HALF, "float8_e4m3fn"),
    ),
    "fa4": functools.partial(
        FlashAttention,
        "fa4",
        "flash_attn.cute",
        lacks=("ALiBi", "bias", "dropout"),
        unlimited=None,
    ),
}


def peer(name: str) -> Competitor:
    """The peer of a name of `flashdig.bench.suite.PEERS`."""
    return _MAKERS[name]()
