"""The process that `interpreter` starts: counts loads, stores and dots while exhibits run.

python -m flashdig.evidence.interpreter_worker FOLDER       with TRITON_INTERPRET=1
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

from flashdig.evidence.quick_interpreter import quicken_interpreter
from flashdig.generations.ladder import generation


class Counter:
    """Counts through the builder methods that every load, store and dot of the interpreter uses."""

    def __init__(self) -> None:
        self.load_bytes = self.store_bytes = self.matmul_flops = 0
        methods: Any = InterpreterBuilder
        load, store = methods.create_masked_load, methods.create_masked_store
        dot = methods.create_dot

        def counted_load(builder: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
            self.load_bytes += _bytes(ptrs, mask)
            return load(builder, ptrs, mask, *rest, **options)

        def counted_store(
            builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any
        ) -> Any:
            self.store_bytes += _bytes(ptrs, mask)
            return store(builder, ptrs, value, mask, *rest, **options)

        def counted_dot(builder: Any, a: Any, b: Any, *rest: Any, **options: Any) -> Any:
            rows, inner = a.data.shape[-2:]
            self.matmul_flops += 2 * rows * inner * b.data.shape[-1]
            return dot(builder, a, b, *rest, **options)

        methods.create_masked_load = counted_load
        methods.create_masked_store = counted_store
        methods.create_dot = counted_dot

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        counts = {
            "load_bytes": self.load_bytes,
            "store_bytes": self.store_bytes,
            "matmul_flops": self.matmul_flops,
        }
        self.load_bytes = self.store_bytes = self.matmul_flops = 0
        return counts


def _bytes(ptrs: Any, mask: Any) -> int:
    element_bytes = ptrs.dtype.scalar.element_ty.primitive_bitwidth // 8
    return int(np.count_nonzero(mask.data)) * int(element_bytes)


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    tensors = torch.load(folder / "inputs.pt", weights_only=True)
    quicken_interpreter()
    counter = Counter()
    counted: list[dict[str, Any]] = []
    outputs: list[dict[str, Any]] = []
    for job, inputs in zip(request, tensors, strict=True):
        counted.append({})
        outputs.append({})
        for name in job["names"]:
            start = time.perf_counter()
            out, lse = generation(name).run(inputs["q"], inputs["k"], inputs["v"], job["causal"])
            seconds = time.perf_counter() - start
            counted[-1][name] = {"counts": counter.take(), "seconds": seconds}
            outputs[-1][name] = {"out": out, "lse": lse}
    torch.save(outputs, folder / "outputs.pt")
    (folder / "counts.json").write_text(json.dumps(counted))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
