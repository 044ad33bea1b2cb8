"""Exact attention for PyTorch, and the instruments that explain it.

Importing flashdig loads neither Triton nor torch; the public names load what they need.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flashdig._version import __version__

if TYPE_CHECKING:
    from flashdig.api import (
        attention,
        attention_varlen,
        attention_with_kvcache,
        merge_partials,
    )
    from flashdig.facades.flash_attn import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from flashdig.problem import AttentionProblem, Mask

_HOMES = {
    "attention": "flashdig.api",
    "attention_varlen": "flashdig.api",
    "attention_with_kvcache": "flashdig.api",
    "merge_partials": "flashdig.api",
    "AttentionProblem": "flashdig.problem",
    "Mask": "flashdig.problem",
    "flash_attn_func": "flashdig.facades.flash_attn",
    "flash_attn_kvpacked_func": "flashdig.facades.flash_attn",
    "flash_attn_qkvpacked_func": "flashdig.facades.flash_attn",
    "flash_attn_varlen_func": "flashdig.facades.flash_attn",
    "flash_attn_varlen_kvpacked_func": "flashdig.facades.flash_attn",
    "flash_attn_varlen_qkvpacked_func": "flashdig.facades.flash_attn",
    "flash_attn_with_kvcache": "flashdig.facades.flash_attn",
}

__all__ = [
    "AttentionProblem",
    "Mask",
    "__version__",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "merge_partials",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flashdig' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
