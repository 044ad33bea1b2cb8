"""Launches: what is kept, when Triton's own code is taken, what surrounds a compilation."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashdig.kernels import compiling, launch
from flashdig.kernels.compiling import compiled_here
from flashdig.kernels.launch import Launch, Tiles


class OnGpu:
    """As much of a CUDA tensor as a launch looks at."""

    is_cuda = True

    def __init__(self, address, dtype=torch.float16, device=0):
        self.address, self.dtype, self.device = address, dtype, device

    def get_device(self):
        return self.device

    def data_ptr(self):
        return self.address


class Recorder:
    """Keeps the arguments that it is called with in a list."""

    def __init__(self, kept):
        self.kept = kept

    def __call__(self, *arguments):
        self.kept.append(arguments)


class Kernel:
    """A JIT function of two tensors, two loose numbers and a constant."""

    arg_names = ("x", "y", "n", "scale", "BLOCK")
    fn = SimpleNamespace(__name__="kernel")

    def __init__(self, specialised=False):
        loose = SimpleNamespace(is_constexpr=False, do_not_specialize=not specialised)
        constant = SimpleNamespace(is_constexpr=True, do_not_specialize=False)
        self.params = [loose, loose, loose, loose, constant]
        self.compiled, self.through_jit, self.run = 0, [], []

    def __getitem__(self, grid):
        def through_jit(*arguments, **options):
            self.through_jit.append((grid, arguments, options))
            self.compiled += 1
            return self.handle()

        return through_jit

    def handle(self):
        launcher = SimpleNamespace(
            launch=Recorder(self.run),
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=False,
        )
        return SimpleNamespace(run=launcher, function=77, packed_metadata=("metadata",))


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    monkeypatch.setattr(launch, "_compiles", lambda kernel: True)
    monkeypatch.setattr(launch, "current_stream", lambda device: 500 + device)
    monkeypatch.setattr(launch, "_FLAT_LAUNCHER", True)
    monkeypatch.setattr(launch, "_kernels", {})


def made(kernel, n=5, scale=0.5, block=16, **options):
    numbers = {"n": n, "scale": scale, "BLOCK": block}
    return Launch(kernel, 3, numbers, num_warps=4, **options)


def test_the_first_call_compiles_and_later_ones_hand_over_addresses() -> None:
    kernel = Kernel()
    one = made(kernel)
    x, y = OnGpu(64), OnGpu(128)
    one(x, y)
    assert kernel.through_jit == [((3,), (x, y, 5, 0.5, 16), {"num_warps": 4})]
    one(y, None)
    flat = (77, False, False, None, None, ("metadata",), None, None, None)
    assert kernel.run == [(3, 1, 1, 500, *flat, 128, None, 5, 0.5, 16)]


def test_a_kernel_is_shared_by_launches_that_triton_would_compile_once() -> None:
    kernel = Kernel()
    made(kernel)(OnGpu(64), OnGpu(128))
    for n in (1, 16, 17, -1, 2**31 - 1):
        made(kernel, n=n, scale=0.25)(OnGpu(32), OnGpu(48))
    assert kernel.compiled == 1
    assert len(kernel.run) == 5


@pytest.mark.parametrize(
    "other",
    [
        lambda kernel: made(kernel, block=32)(OnGpu(64), OnGpu(128)),
        lambda kernel: made(kernel, n=2**31)(OnGpu(64), OnGpu(128)),
        lambda kernel: made(kernel, n=True)(OnGpu(64), OnGpu(128)),
        lambda kernel: made(kernel, n=5.0)(OnGpu(64), OnGpu(128)),
        lambda kernel: made(kernel, block=True)(OnGpu(64), OnGpu(128)),
        lambda kernel: made(kernel, num_stages=2)(OnGpu(64), OnGpu(128)),
        lambda kernel: made(kernel)(OnGpu(68), OnGpu(128)),
        lambda kernel: made(kernel)(OnGpu(64), None),
        lambda kernel: made(kernel)(OnGpu(64, torch.bfloat16), OnGpu(128)),
        lambda kernel: made(kernel)(OnGpu(64, device=1), OnGpu(128, device=1)),
    ],
    ids=[
        "constant",
        "wide integer",
        "bool",
        "float",
        "a constant of another type",
        "option",
        "alignment",
        "no tensor",
        "dtype",
        "device",
    ],
)
def test_what_triton_compiles_apart_is_kept_apart(other) -> None:
    kernel = Kernel()
    made(kernel, block=1)(OnGpu(64), OnGpu(128))
    made(kernel)(OnGpu(64), OnGpu(128))
    assert kernel.compiled == 2
    other(kernel)
    assert kernel.compiled == 3
    other(kernel)
    assert kernel.compiled == 3


def test_numbers_that_triton_specialises_on_count_as_constants() -> None:
    kernel = Kernel(specialised=True)
    for n in (1, 16, 1, 16):
        made(kernel, n=n)(OnGpu(64), OnGpu(128))
    assert kernel.compiled == 2


def test_a_listener_sees_every_launch(monkeypatch) -> None:
    kernel = Kernel()
    one = made(kernel)
    one(OnGpu(64), OnGpu(128))
    heard = []
    knobs.runtime.launch_enter_hook.add(heard.append)
    try:
        one(OnGpu(64), OnGpu(128))
        made(kernel)(OnGpu(64), OnGpu(128))
    finally:
        knobs.runtime.launch_enter_hook.remove(heard.append)
    assert kernel.compiled == 3
    assert not kernel.run
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", heard.append)
    one(OnGpu(64), OnGpu(128))
    assert kernel.compiled == 4
    monkeypatch.undo()


def test_other_releases_launchers_are_called_as_triton_calls_them(monkeypatch) -> None:
    monkeypatch.setattr(launch, "_FLAT_LAUNCHER", False)
    kernel = Kernel()
    kernel.handle = lambda: SimpleNamespace(
        run=Recorder(kernel.run), function=77, packed_metadata="m"
    )
    one = made(kernel)
    for _ in range(2):
        one(OnGpu(64), OnGpu(128))
    assert kernel.run == [(3, 1, 1, 500, 77, "m", None, None, None, 64, 128, 5, 0.5, 16)]


def test_tensors_elsewhere_always_go_through_triton() -> None:
    kernel = Kernel()
    one = made(kernel)
    for _ in range(2):
        one(torch.empty(4), torch.empty(4, device="meta"))
    assert kernel.compiled == 2
    assert not launch._kernels


def test_numbers_must_be_the_last_arguments() -> None:
    with pytest.raises(ValueError, match="must be its last arguments"):
        Launch(Kernel(), 1, {"x": 1, "scale": 1.0, "BLOCK": 16})


def test_a_descriptor_is_filled_once_for_addresses_that_come_together(monkeypatch) -> None:
    filled = []
    tile = Tiles((4, 8), (8, 1), (2, 8), "layout")
    descriptors = launch._Descriptors({1: tile}, [{}])

    def fill(place, address):
        filled.append((place, address))
        return [f"map {address}", *tile.shape, *tile.strides]

    monkeypatch.setattr(descriptors, "_fill", fill)
    for address in (64, 128, 64, 64):
        found = descriptors.arguments((OnGpu(32), OnGpu(address), None))
        assert found == (32, f"map {address}", 4, 8, 8, 1, None)
    assert filled == [(1, 64), (1, 128)]
    assert descriptors.arguments((OnGpu(48), OnGpu(64), None))[0] == 48
    for address in range(launch._Descriptors.KEPT + 5):
        descriptors.arguments((OnGpu(32), OnGpu(16 * address), None))
    assert len(descriptors._known) <= launch._Descriptors.KEPT


def test_whoever_waits_for_a_compiler_is_told_why_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr(compiling, "PATIENCE", 0.05)
    assert compiled_here(lambda: 7, "quick") == 7
    assert compiled_here(lambda: time.sleep(0.3), "slow") is None
    time.sleep(0.1)
    said = capsys.readouterr().err.splitlines()
    assert said == ["flashdig: compiling slow for this GPU, once"]


def test_errors_of_a_launch_pass_through() -> None:
    def launch_that_fails():
        raise FileNotFoundError(2, "No such file", "/somewhere/else")

    with pytest.raises(FileNotFoundError, match="/somewhere/else"):
        compiled_here(launch_that_fails, "kernel")
    with pytest.raises(ZeroDivisionError):
        compiled_here(lambda: 1 / 0, "kernel")


@triton.jit
def doubled(x_ptr):
    triton.language.store(x_ptr, 2 * triton.language.load(x_ptr))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no folders")
def test_a_cache_that_cannot_be_written_is_replaced_for_what_it_lacks(monkeypatch, capsys) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/flashdig-cache")
    source = ASTSource(fn=doubled, signature={"x_ptr": "*fp32"}, constexprs={})

    def compile_it():
        return triton.compile(source, target=GPUTarget("cuda", 90, 32))

    with pytest.raises(OSError, match="flashdig-cache"):
        compile_it()
    for _ in range(2):
        assert compiled_here(compile_it, "doubled").asm["cubin"]
    assert knobs.cache.dir == "/proc/flashdig-cache"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flashdig: cannot write Triton's cache folder /proc/flashdig-cache (")
