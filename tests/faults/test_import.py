"""Machines without a GPU or Triton, and many processes that compile the same kernels at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashdig

SOURCE = str(Path(flashdig.__file__).parents[1])
DATA = Path(__file__).parents[1] / "data" / "traces"

NO_GPU = """
import sys
if "no triton" in sys.argv:
    sys.modules["triton"] = None
import torch
import flashdig, flashdig.readers.trace
assert not torch.cuda.is_available()
q = torch.randn(1, 33, 4, 16, requires_grad=True)
k = torch.randn(1, 40, 2, 16, requires_grad=True)
out, lse = flashdig.attention(q, k, k, causal=True, softcap=5.0, return_lse=True)
(out.sum() + lse.sum()).backward()
assert out.isfinite().all() and q.grad.any() and k.grad.any()
assert "torch._dynamo" not in sys.modules  # torch's compiler takes a second to import
"""


def run(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, *(("-c", code) if code else ()), *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, **environment},
    )


@pytest.mark.parametrize("triton", ["", "no triton"])
def test_attention_and_readers_work_without_a_gpu(triton) -> None:
    done = run(NO_GPU, triton, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


def test_the_trace_command_works_without_a_gpu() -> None:
    trace = str(DATA / "attn_fa3.json.gz")
    done = run(None, "-m", "flashdig", "trace", trace, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "FlashAttention-3" in done.stdout


RANK = """
import hashlib, time, sys, torch
from flashdig import attention
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
generator = torch.Generator("cuda").manual_seed(0)
inputs = [torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16, generator=generator,
                      requires_grad=True) for _ in range(3)]
out = attention(*inputs, causal=True, deterministic=True, backend="triton")
found = (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))
print(hashlib.sha256(b"".join(x.detach().float().cpu().numpy().tobytes() for x in found))
      .hexdigest())
"""


@pytest.mark.heavy
@pytest.mark.gpu
def test_eight_processes_share_an_empty_cache(tmp_path) -> None:
    import time

    for round_number in range(5):
        cache = tmp_path / str(round_number)
        environment = {**os.environ, "PYTHONPATH": SOURCE, "TRITON_CACHE_DIR": str(cache)}
        # long enough that all have imported torch
        start = str(time.time() + 20)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, start],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for _ in range(8)
        ]
        results = [(*rank.communicate(timeout=300), rank.returncode) for rank in ranks]
        assert all(code == 0 for _, _, code in results), results
        assert len({out for out, _, _ in results}) == 1
    torch.cuda.synchronize()


READ_ONLY = """
import torch
from flashdig import attention
torch.manual_seed(0)
q, k, v = (torch.randn(1, 65, 2, 64, device="cuda").requires_grad_() for _ in range(3))
for _ in range(2):
    out = attention(q, k, v, causal=True, backend="triton")
    out.sum().backward()
expected = attention(q, k, v, causal=True, backend="reference")
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.gpu
def test_a_cache_folder_that_cannot_be_written() -> None:
    """Kernels are compiled into a folder of this process, and one line says so."""
    done = run(READ_ONLY, TRITON_CACHE_DIR="/proc/flashdig-cache")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "cannot write" in line]
    assert line.startswith("flashdig: cannot write Triton's cache folder /proc/flashdig-cache")
