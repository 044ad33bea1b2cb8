"""The quickened interpreter computes what Triton's own does, to the bit."""

import os
import subprocess
import sys

from flashdig.evidence.interpreter import interpreter_fault
from flashdig.evidence.worker import SOURCE_FOLDER

PROGRAM = """
import inspect, torch
from triton.runtime import interpreter
from flashdig import attention
from flashdig.evidence.quick_interpreter import quicken_interpreter

searches, search = [0], inspect.getmembers
def counted(*arguments):
    searches[0] += 1
    return search(*arguments)
interpreter.inspect.getmembers = counted

def results():
    searches[0] = 0
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 16).requires_grad_() for n, h in ((9, 1), (40, 1), (40, 1)))
    out, lse = attention(q, k, v, causal=True, window=(20, 0), softcap=3.0, dropout_p=0.2,
                         return_lse=True, backend="triton")
    return [out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), (q, k, v))]

own = results()
assert searches[0] > 100 and interpreter.interpreter_builder.options.sanitize_overflow
quicken_interpreter()
quick = results()
assert searches[0] == 0 and not interpreter.interpreter_builder.options.sanitize_overflow
assert all(map(torch.equal, own, quick)) and all(x.isfinite().all() for x in own)
"""


def test_the_same_bits_without_a_search_of_the_language() -> None:
    assert interpreter_fault() is None
    path = os.pathsep.join([str(SOURCE_FOLDER), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
