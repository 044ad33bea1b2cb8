"""What the Triton kernels over caches and pages can serve, without loading torch or Triton."""

from __future__ import annotations

# by bytes of an element of q
_MAX_HEAD_DIM = {1: 1024, 2: 1024, 4: 256}
_MAX_HEAD_DIM_V = {1: 512, 2: 512, 4: 256}
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}


def reasons_against_triton(
    device_type: str,
    capability: tuple[int, int] | None,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    *,
    interpreter: bool,
) -> list[str]:
    """Why the kernels over caches and pages cannot serve a call; empty when they can.

    Args:
        dtype: torch's name of the dtype of q.
        interpreter: Triton runs kernels in its interpreter, so CPU tensors will do.
    """
    reasons = []
    if device_type != "cuda" and not interpreter:
        reasons.append(
            f"runs on NVIDIA GPUs, not on {device_type} (except asked for by name under "
            "TRITON_INTERPRET=1)"
        )
    if capability is not None and capability < (8, 0):
        major, minor = capability
        reasons.append(f"needs compute capability 8.0, the device has {major}.{minor}")
    sizes = dict(_ELEMENT_BYTES)
    if interpreter:
        del sizes["bfloat16"]  # Triton's interpreter multiplies it wrongly
    if dtype not in sizes:
        return [*reasons, f"serves {', '.join(sizes)}, not {dtype}"]
    for name, size, most in (
        ("head_dim", head_dim, _MAX_HEAD_DIM[sizes[dtype]]),
        ("head_dim_v", head_dim_v, _MAX_HEAD_DIM_V[sizes[dtype]]),
    ):
        if not 1 <= size <= most:
            reasons.append(f"{name} must be between 1 and {most} for {dtype}, not {size}")
    return reasons
