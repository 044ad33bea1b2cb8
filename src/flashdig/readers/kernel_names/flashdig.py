"""flashdig's own kernels: those that users run, and the exhibits of the dig.

Users' kernels: `flashdig_forward_bf16_d64_m128n64_causal`; one with head_dim_v of its own says
`d192v128`, and the features that it was compiled with stand behind the tile. Exhibits:
`flash_fwd_v2_fp16_d64_m64n64_causal`.
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
    tensor_core_words,
    tile_words,
)
from flashdig.readers.kernel_names.symbol import Symbol

_FEATURES = {
    "varlen": "packed",
    "paged": "keys in pages",
    "cache": "keys in a cache",
    "grouped": "heads that share keys in one tile",
    "softcap": "softcap",
    "alibi": "ALiBi",
    "sinks": "sinks",
    "dropout": "dropout",
    "bias": "bias",
    "boolbias": "boolean bias",
}
_DTYPE = r"_(?P<dtype>fp32|tf32|fp16|bf16|e4m3)"
_KERNEL = re.compile(
    rf"^flashdig_(?:hopper_)?(?P<what>forward|backward(?:_(?:dq|dkdv|dk|dv|bias))?){_DTYPE}"
    r"_d(?P<d>\d{1,4})(?:v(?P<v>\d{1,4}))?_m(?P<m>\d{1,4})n(?P<n>\d{1,4})"
    rf"(?:_(?P<mask>full|causal|window))?(?P<features>(?:_(?:{'|'.join(_FEATURES)}))*)$"
)
_DELTA = re.compile(rf"^flashdig_backward_delta{_DTYPE}_v(?P<v>\d{{1,4}})$")
_AROUND = re.compile(
    rf"^flashdig_hopper_backward_(?P<what>preprocess|postprocess){_DTYPE}_[dv](?P<d>\d{{1,4}})$"
)
_STEPS = {
    "preprocess": ("first step", "delta = rowsum(dO * O), zeros for dQ", "head_dim_v"),
    "postprocess": ("last step", "dQ from float32 sums", "head_dim"),
}
# whose names say nothing more
_HELPERS = {
    "flashdig_append_kv": "appends keys or values to a cache, or rotates queries",
    "flashdig_clear_slack": "clears rows of packed results that belong to no sequence",
    "flashdig_fp8_values_by_column": "turns V for attention in fp8",
    "flashdig_list_tiles": "lists tiles of queries of long sequences over a cache",
    "flashdig_plan_pieces": "cuts the keys of sequences of different lengths into pieces",
}
_GRADIENTS = {
    "backward": "backward, dq, dk and dv",
    "backward_dq": "backward, dq",
    "backward_dkdv": "backward, dk and dv",
    "backward_dk": "backward, dk",
    "backward_dv": "backward, dv",
    "backward_bias": "backward, the bias's gradient",
}
_EXHIBIT = re.compile(
    r"^(?P<what>flash_fwd|flash_bwd(?:_[a-z]+)*|flash_decode|flash_combine|online_softmax)_"
    r"(?:(?P<generation>[a-z0-9]+(?:_[a-z0-9]+)*?)_)?"
    r"(?P<dtype>fp32|tf32|fp16|bf16)(?P<rest>(?:_[a-z0-9]+)*)$"
)


def decode(symbol: Symbol) -> KernelName | None:
    """A kernel of flashdig; None for anything else."""
    return (
        _kernel(symbol) or _helper(symbol) or _delta(symbol) or _around(symbol) or _exhibit(symbol)
    )


def _helper(symbol: Symbol) -> KernelName | None:
    words = _HELPERS.get(symbol.text)
    return None if words is None else part(symbol, "forward", None, words)


def part(symbol: Symbol, pass_: Pass, dtype: str | None, what: str, *words: str) -> KernelName:
    """A kernel beside the one that attends, without tensor cores.

    Args:
        what: what it does; words: what stands behind the dtype.
    """
    return KernelName(
        name=symbol.name,
        family="flashdig",
        backend="flashdig",
        role="attention_part",
        pass_=pass_,
        dtype=dtype,
        tensor_cores=False,
        words=sentence(f"flashdig: {what}", dtype_words(dtype) if dtype else "", *words),
    )


def _kernel(symbol: Symbol) -> KernelName | None:
    found = _KERNEL.match(symbol.text)
    if found is None:
        return None
    forward = found["what"] == "forward"
    dtype = DTYPES[found["dtype"]]
    tile = (int(found["m"]), int(found["n"]))
    # a window may be a causal one: its name does not say
    causal = {"causal": True, "window": None, "full": False, None: False}[found["mask"]]
    mask = {True: "causal", False: "not causal", None: "in a window"}[causal]
    head_dim = f"head_dim {found['d']}" + (f" (v: {found['v']})" if found["v"] else "")
    features = [_FEATURES[word] for word in found["features"].split("_") if word]
    # float32 that is not TF32 is multiplied on the CUDA cores
    tensor_cores = dtype != "float32"
    return KernelName(
        name=symbol.name,
        family="flashdig",
        backend="flashdig",
        role="attention_forward" if forward else "attention_backward",
        pass_="forward" if forward else "backward",
        dtype=dtype,
        tile=tile,
        head_dim=int(found["d"]),
        tensor_cores=tensor_cores,
        causal=causal,
        words=sentence(
            f"flashdig: attention {_GRADIENTS.get(found['what'], 'forward')}",
            dtype_words(dtype),
            head_dim,
            tile_words(tile),
            mask,
            *features,
            tensor_core_words(tensor_cores),
        ),
    )


def _delta(symbol: Symbol) -> KernelName | None:
    found = _DELTA.match(symbol.text)
    if found is None:
        return None
    what = "attention backward's first step, delta = rowsum(dO * O)"
    return part(symbol, "backward", DTYPES[found["dtype"]], what, f"head_dim_v {found['v']}")


def _around(symbol: Symbol) -> KernelName | None:
    """What runs before and after the Hopper backward's main kernel."""
    found = _AROUND.match(symbol.text)
    if found is None:
        return None
    step, what, width = _STEPS[found["what"]]
    words = f"attention backward's {step}, {what}"
    return part(symbol, "backward", DTYPES[found["dtype"]], words, f"{width} {found['d']}")


def _exhibit(symbol: Symbol) -> KernelName | None:
    found = _EXHIBIT.match(symbol.text)
    if found is None:
        return None
    named = found["generation"] or ""
    words = (named + found["rest"]).split("_")
    arch = next((w for w in words if re.fullmatch(r"sm\d{2,3}a?", w)), None)
    generation = "_".join(w for w in named.split("_") if w != arch) or None
    dtype = DTYPES[found["dtype"]]
    rest = found["rest"].split("_")
    head_dim = next((int(w[1:]) for w in rest if re.fullmatch(r"d\d{1,4}", w)), None)
    blocks = next((m for w in rest if (m := re.fullmatch(r"m(\d{1,4})n(\d{1,4})", w))), None)
    tile = (int(blocks.group(1)), int(blocks.group(2))) if blocks else None
    causal = {True: True, False: None}["causal" in rest]
    if "full" in rest:
        causal = False
    role, pass_, what = _exhibit_role(found["what"])
    if found["dtype"] == "tf32":
        tensor_cores: bool | None = True
    else:
        # Triton multiplies float32 on the CUDA cores with input_precision="ieee", which is what
        # the exhibits use; bfloat16 exists only where it has tensor cores for it
        tensor_cores = {"float32": False, "bfloat16": True}.get(dtype, True if arch else None)
    return KernelName(
        name=symbol.name,
        family="flashdig",
        backend="flashdig",
        role=role,
        pass_=pass_,
        dtype=dtype,
        tile=tile,
        head_dim=head_dim,
        arch=arch,
        tensor_cores=tensor_cores,
        pipeline=generation,
        causal=causal,
        words=sentence(
            f"flashdig: {what}" + (f", generation {generation}" if generation else ""),
            dtype_words(dtype),
            "" if head_dim is None else f"head_dim {head_dim}",
            tile_words(tile),
            {True: "causal", False: "not causal", None: ""}[causal],
            arch_words(arch),
        ),
    )


def _exhibit_role(what: str) -> tuple[Role, Pass, str]:
    if what.startswith("flash_bwd"):
        if re.search(r"pre|post|delta|convert", what):
            return "attention_part", "backward", "a helper of the attention backward"
        return "attention_backward", "backward", "attention backward"
    if what == "flash_combine":
        return "attention_part", "forward", "joins partial attention results"
    if what == "online_softmax":
        return "attention_part", "forward", "online softmax over scores in memory"
    if what == "flash_decode":
        return "attention_forward", "forward", "attention for few queries over a cache, forward"
    return "attention_forward", "forward", "attention forward"
