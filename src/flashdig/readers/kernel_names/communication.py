"""Communication kernels (NCCL, RCCL) and the driver's copies and fills."""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import DTYPES, KernelName, dtype_words, sentence
from flashdig.readers.kernel_names.symbol import Symbol

# at the beginning only: a kernel that merely has "nccl" in its name is not communication
_NCCL = re.compile(r"^(?:nccl(?:Dev)?Kernel_(?P<what>\w+)|(?P<rccl>rccl\w*Kernel\w*))")
_COLLECTIVES = {
    "AllReduce": "all-reduce",
    "AllGather": "all-gather",
    "ReduceScatter": "reduce-scatter",
    "Broadcast": "broadcast",
    "SendRecv": "send and receive",
    "Reduce": "reduce",
    "Generic": "a fused or generic collective",
}
_ALGORITHMS = {"RING": "ring", "TREE": "tree", "COLLNET": "in-network", "NVLS": "NVLink SHARP"}
_PROTOCOLS = {"LL128": "protocol LL128", "LL": "protocol LL", "SIMPLE": "protocol Simple"}
_MEMORY = re.compile(r"^Mem(?P<what>cpy|set)\b *(?P<direction>\w*)")


def decode(symbol: Symbol) -> KernelName | None:
    """A collective of NCCL or RCCL, or a copy or fill by the driver; None for anything else."""
    found = _NCCL.match(symbol.text)
    if found is not None:
        return _collective(symbol, found)
    memory = _MEMORY.match(symbol.text)
    if memory is None:
        return None
    copies = memory["what"] == "cpy"
    return KernelName(
        name=symbol.name,
        family="cuda",
        backend=None,
        role="copy",
        tensor_cores=False,
        words=f"Copy by the driver ({memory['direction']})."
        if copies and memory["direction"]
        else ("Copy by the driver." if copies else "Fill by the driver (memset)."),
    )


def _collective(symbol: Symbol, found: re.Match[str]) -> KernelName:
    words = (found["what"] or "").split("_")
    what = _COLLECTIVES.get(words[0], words[0] or "a collective")
    dtype = next((DTYPES[w] for w in words if w in DTYPES), None)
    pipeline = [table[w] for table in (_ALGORITHMS, _PROTOCOLS) for w in words if w in table]
    rccl = found["rccl"] is not None
    return KernelName(
        name=symbol.name,
        family="nccl",
        backend="rccl" if rccl else "nccl",
        role="communication",
        dtype=dtype,
        tensor_cores=False,
        pipeline=", ".join(pipeline) or None,
        words=sentence(
            f"{'RCCL' if rccl else 'NCCL'}: {what}",
            "sum" if "Sum" in words else "",
            dtype_words(dtype),
            *pipeline,
        ),
    )
