"""Exact attention for PyTorch, and the instruments that explain it.

Importing flashdig loads neither Triton nor torch.
"""

from flashdig._version import __version__

__all__ = ["__version__"]
