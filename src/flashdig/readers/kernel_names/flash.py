"""FlashAttention's kernels: 2 (also the copy inside PyTorch), 3 and 4.

Template parameters as in the projects' sources: flash-attention `csrc/flash_attn/src/
flash_fwd_kernel.h` and `kernel_traits.h`, `hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp`,
`hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp`; FlashAttention-4's names come from CuTe DSL, which
writes the module, the class and the types of the arguments.
"""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import (
    DTYPES,
    KernelName,
    Pass,
    Role,
    arch_words,
    dtype_words,
    sentence,
    tile_words,
)
from flashdig.readers.kernel_names.symbol import Symbol, flag, number, numbers, template_arguments

# function of FlashAttention-2 -> (role, pass, what it does, position of Is_causal or None)
_FA2: dict[str, tuple[Role, Pass, str, int | None]] = {
    "flash_fwd_kernel": ("attention_forward", "forward", "forward", 1),
    "flash_fwd_splitkv_kernel": (
        "attention_forward",
        "forward",
        "forward for few queries, the keys split over blocks (Flash-Decoding)",
        0,
    ),
    "flash_fwd_splitkv_combine_kernel": (
        "attention_part",
        "forward",
        "forward, joins the partial results of the key splits",
        None,
    ),
    "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": (
        "attention_backward",
        "backward",
        "backward, dq, dk and dv in one kernel, blocks over keys",
        1,
    ),
    "flash_bwd_dq_dk_dv_loop_kernel": (
        "attention_backward",
        "backward",
        "backward, dq, dk and dv in one kernel, one block a head",
        1,
    ),
    "flash_bwd_dot_do_o_kernel": (
        "attention_part",
        "backward",
        "backward's first step, delta = rowsum(dO * O)",
        None,
    ),
    "flash_bwd_convert_dq_kernel": (
        "attention_part",
        "backward",
        "backward's last step, dq from float32 to the dtype",
        None,
    ),
    "flash_bwd_convert_dkv_kernel": (
        "attention_part",
        "backward",
        "backward's last step, dk and dv from float32 to the dtype",
        None,
    ),
}


def decode(symbol: Symbol) -> KernelName | None:
    """FlashAttention-2, -3 or -4; None for anything else."""
    if symbol.base in _FA2:
        return _flash_attention_2(symbol)
    if "FlashAttnFwd" in symbol.text or "FlashAttnBwd" in symbol.text:
        return _flash_attention_3(symbol)
    if symbol.base.startswith("prepare_varlen_num_blocks_kernel"):
        return KernelName(
            name=symbol.name,
            family="flash_attention_3",
            backend="flash_attention_3",
            role="attention_part",
            pass_="forward",
            words="FlashAttention-3, counts the tiles of each packed sequence before the forward.",
        )
    if "flash_attncute" in symbol.text and symbol.text.startswith("kernel_cutlass"):
        return _flash_attention_4(symbol)
    return None


def _flash_attention_2(symbol: Symbol) -> KernelName:
    role, pass_, what, causal_at = _FA2[symbol.base]
    in_torch = symbol.function.startswith("pytorch_flash")
    traits = symbol.inner("kernel_traits")
    dtype = next((DTYPES[a] for a in traits if a in DTYPES and not a.isdigit()), None)
    if dtype is None:
        dtype = next((DTYPES[a.rsplit("::", 1)[-1]] for a in traits if _is_dtype(a)), None)
    head_dim, rows, keys, warps = (number(traits, i) for i in range(4))
    tile = (rows, keys) if rows is not None and keys is not None else None
    causal = None if causal_at is None else _causal(symbol.arguments, 1 + causal_at)
    matmuls = role != "attention_part"
    whose = "FlashAttention-2 inside PyTorch" if in_torch else "FlashAttention-2"
    return KernelName(
        name=symbol.name,
        family="flash_attention_2",
        backend="flash" if in_torch else "flash_attention_2",
        role=role,
        pass_=pass_,
        dtype=dtype,
        tile=tile,
        head_dim=head_dim,
        tensor_cores=True if matmuls else None,
        pipeline=None if warps is None else f"{warps} warps",
        causal=causal,
        words=sentence(
            f"{whose}: {what}",
            dtype_words(dtype),
            "" if head_dim is None else f"head_dim {head_dim}",
            tile_words(tile),
            _causal_words(causal),
            "mma.sync on tensor cores" if matmuls else "",
        ),
    )


def _is_dtype(argument: str) -> bool:
    return argument.rsplit("::", 1)[-1] in DTYPES and not argument.isdigit()


def _causal(arguments: tuple[str, ...], position: int) -> bool | None:
    """Is_causal, unless Is_local behind it is set: a causal window is compiled as a local one."""
    return None if flag(arguments, position + 1) else flag(arguments, position)


def _causal_words(causal: bool | None) -> str:
    return {True: "causal", False: "not causal", None: ""}[causal]


_FA3_PARTS: dict[str, tuple[Role, Pass, str]] = {
    "FlashAttnFwdCombine": ("attention_part", "forward", "joins the partial results of the splits"),
    "FlashAttnFwdPostprocess": ("attention_part", "forward", "forward's last step"),
    "FlashAttnBwdPreprocess": (
        "attention_part",
        "backward",
        "backward's first step, delta = rowsum(dO * O)",
    ),
    "FlashAttnBwdPostprocess": (
        "attention_part",
        "backward",
        "backward's last step, gradients from float32 to the dtype",
    ),
    "FlashAttnBwd": ("attention_backward", "backward", "backward, dq, dk and dv"),
    "FlashAttnFwd": ("attention_forward", "forward", "forward"),
}


def _flash_attention_3(symbol: Symbol) -> KernelName:
    role, pass_, what = next(v for k, v in _FA3_PARTS.items() if k in symbol.text)
    arch_digits = numbers(symbol.text, r"arch::Sm(\d+)") or numbers(
        symbol.text, r"FlashAttn[FB]wdSm(\d+)"
    )
    arch = f"sm{arch_digits[0]}" if arch_digits else None
    main = _FA3Mainloop(symbol) if role != "attention_part" else None
    dtype = main.dtype if main else _first_dtype(symbol)
    causal = main.causal if main else None
    hopper = arch == "sm90"
    return KernelName(
        name=symbol.name,
        family="flash_attention_3",
        backend="flash_attention_3",
        role=role,
        pass_=pass_,
        dtype=dtype,
        tile=main.tile if main else None,
        head_dim=main.head_dim if main else None,
        arch=arch,
        tensor_cores=True if main else None,
        pipeline=main.pipeline if main else None,
        causal=causal,
        words=sentence(
            f"FlashAttention-3: {what}",
            dtype_words(dtype),
            f"head_dim {main.head_dim}" if main and main.head_dim else "",
            tile_words(main.tile) if main else "",
            _causal_words(causal),
            main.pipeline if main else "",
            "wgmma and TMA on tensor cores" if main and hopper else "",
            arch_words(arch),
        ),
    )


class _FA3Mainloop:
    """What the collective main loop's template arguments say."""

    def __init__(self, symbol: Symbol) -> None:
        found = re.search(r"CollectiveMainloop[FB]wdSm\d+", symbol.text)
        arguments = symbol.inner(found.group()) if found else ()
        cubes = [numbers_of_cute(a) for a in arguments]
        shapes = [c for c in cubes if len(c) == 3]
        # the cluster shape stands before the tile shape
        shape = shapes[1] if len(shapes) > 1 else None
        self.tile = None if shape is None else shape[:2]
        self.head_dim = None if shape is None else shape[2]
        self.dtype = next(
            (DTYPES[a] for a in arguments if a.startswith("cutlass::") and a in DTYPES), None
        )
        arch_at = next((i for i, a in enumerate(arguments) if "arch::Sm" in a), None)
        self.causal = None if arch_at is None else _causal(arguments, arch_at + 1)
        stages = number(arguments, 0)
        scheduler = re.search(r"flash::(\w*Scheduler)<", symbol.text)
        words = [
            f"{stages} stages" if stages is not None else "",
            scheduler.group(1) if scheduler else "",
        ]
        self.pipeline = ", ".join(w for w in words if w) or None


def numbers_of_cute(argument: str) -> tuple[int, ...]:
    """The sizes in 'cute::tuple<cute::C<192>, cute::C<128>, cute::C<64> >'; () if it is none."""
    if not argument.startswith("cute::tuple<"):
        return ()
    return tuple(int(digits) for digits in re.findall(r"C<(\d{1,9})", argument))


def _first_dtype(symbol: Symbol) -> str | None:
    wrapped = symbol.arguments[0] if symbol.arguments else ""
    return next(
        (DTYPES[a.rsplit("::", 1)[-1]] for a in template_arguments(wrapped) if _is_dtype(a)), None
    )


_FA4_PARTS: dict[str, tuple[Role, Pass, str]] = {
    "BackwardPreprocess": (
        "attention_part",
        "backward",
        "backward's first step, delta = rowsum(dO * O)",
    ),
    "BackwardPostprocess": (
        "attention_part",
        "backward",
        "backward's last step, dq from float32 to the dtype",
    ),
    "ForwardCombine": ("attention_part", "forward", "joins the partial results of the splits"),
    "Backward": ("attention_backward", "backward", "backward, dq, dk and dv"),
    "Forward": ("attention_forward", "forward", "forward"),
}


def _flash_attention_4(symbol: Symbol) -> KernelName:
    found = re.search(r"FlashAttention(\w+?)(?:Sm(\d+))?_object_at", symbol.text)
    kind = found.group(1) if found else symbol.text
    part = next((v for k, v in _FA4_PARTS.items() if kind.startswith(k)), None)
    role, pass_, what = part or ("attention_part", None, "a helper kernel")
    arch = f"sm{found.group(2)}" if found and found.group(2) else None
    pointers = re.search(r"tensorptr(bf16|f16|f8e4m3|f8e5m2)", symbol.text)
    names = {"f8e4m3": "e4m3", "f8e5m2": "e5m2"}
    dtype = DTYPES[names.get(pointers.group(1), pointers.group(1))] if pointers else None
    matmuls = role != "attention_part"
    how = {"sm90": "wgmma and TMA", "sm100": "tcgen05 and TMA"}.get(arch or "", "")
    return KernelName(
        name=symbol.name,
        family="flash_attention_4",
        backend="flash_attention_4",
        role=role,
        pass_=pass_,
        dtype=dtype,
        arch=arch,
        tensor_cores=True if matmuls else None,
        words=sentence(
            f"FlashAttention-4 (CuTe DSL): {what}",
            dtype_words(dtype),
            (how + " on tensor cores").strip() if matmuls else "",
            arch_words(arch),
        ),
    )
