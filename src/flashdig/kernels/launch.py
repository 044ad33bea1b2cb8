"""The cheap way from tensors to a running kernel: kept handles, kept descriptors, kept plans.

What a call costs before its kernel runs is Python: working out strides and constants, and Triton's
own binding of some sixty arguments. All of it depends on shapes, strides, dtypes and options alone,
so it is done once:

- A `Launch` is one kernel with its grid and all arguments but the tensors. Its first call goes
  through Triton's JIT; later ones hand addresses to the compiled kernel's launcher. Kernels are
  kept by what Triton specialises on, so a new length needs no JIT either.
- A *plan* is a function of the operator's tensors that allocates results and runs launches. It is
  made once for a flat key and then kept (`flashdig.kernels.plans`).

How a backend joins: the modules that `flashdig.ops.attention.LAUNCHERS` names for it may hold, next
to `attention_forward` and `attention_backward` and with the same arguments,

    plan_forward(q, k, v, ..., seqused_k, *, softmax_scale, ..., out_dtype) -> Plan | None
    plan_backward(grad_out, grad_lse, q, ..., out, lse, *, ..., wanted) -> Plan | None

A plan is called with tensors only, in that order, and returns what the function would; it may be
called by several threads, must keep no tensor, and serves every call whose tensors have the same
shapes, strides, dtypes, device and 16-byte alignment. None means that there is no plan for such a
call (a tensor has to be copied first, a size is zero): the function itself serves it each time. A
kernel that takes TMA descriptors gives its `Launch` the `Tiles` of those arguments.

With a launch hook of Triton's (a profiler's), in its interpreter, or on tensors without memory,
every launch goes through the JIT.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
from triton import knobs

from flashdig.kernels.compiling import compiled_here
from flashdig.kernels.plans import is_aligned

_kernels: dict[Hashable, Any] = {}
# what code of torch.compile allocates with: a third of the time of torch.empty
_fast_empty: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None
)
# (device index) -> the handle of its current stream
current_stream = cast(
    "Callable[[int], int]", getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
)
# Triton releases whose compiled launcher was read: its arguments differ between releases
_FLAT_LAUNCHER = triton.__version__.startswith("3.6.")


@functools.cache
def multiprocessors(device: torch.device, elsewhere: int) -> int:
    """Of a CUDA device; `elsewhere` in the interpreter and for tensors without memory."""
    if device.type != "cuda":
        return elsewhere
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def allocation(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A function that allocates a contiguous tensor on `device`, which must then be the current
    one."""
    if device.type != "cuda" or _fast_empty is None:
        return functools.partial(torch.empty, tuple(shape), dtype=dtype, device=device)
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    return functools.partial(_fast_empty, tuple(shape), tuple(strides), dtype)


# a compiled kernel's launcher, all of its arguments
Bound = tuple[Callable[..., None], tuple[Any, ...]]


@dataclass(frozen=True)
class Tiles:
    """What a TMA descriptor says beside the address of its tensor.

    Attributes:
        shape, strides: of the tensor as the descriptor sees it, in elements; the last stride is 1.
        block: sizes of one tile.
        layout: Gluon's shared-memory layout of a tile.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any

    def descriptor(self, base: torch.Tensor) -> Any:
        """Triton's descriptor object, as its JIT takes it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(
            base, list(self.shape), list(self.strides), list(self.block), self.layout
        )


class Launch:
    """One kernel with its grid and every argument but its leading tensors.

    Called with those tensors in the kernel's order, it runs the kernel on their device, which must
    be the current one, and on the current stream. Numbers that are no constexpr must not be
    specialised by value, or they count as constants here too.

    Args:
        kernel: a function under @triton.jit or @gluon.jit.
        programs: blocks of the grid.
        numbers: the arguments behind the tensors, by name.
        tiles: argument name -> `Tiles`, for those that the kernel takes as a TMA descriptor.
        options: num_warps and other options of the launch.
    """

    __slots__ = (
        "_descriptors",
        "_device",
        "_flat",
        "_kernel",
        "_lock",
        "_middle",
        "_options",
        "_programs",
        "_rest",
        "_run",
        "_tiles",
    )

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: Mapping[str, Any],
        tiles: Mapping[str, Tiles] | None = None,
        **options: Any,
    ) -> None:
        leading, behind = _split(kernel, frozenset(numbers))
        self._kernel = kernel
        self._programs = programs
        self._rest = tuple(numbers[name] for name in behind)
        self._options = options
        self._tiles = {leading.index(name): tile for name, tile in (tiles or {}).items()}
        self._descriptors: _Descriptors | None = None
        self._run: Any = None
        self._flat = False
        self._middle: tuple[Any, ...] = ()
        self._device = -1
        self._lock = threading.Lock()

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        if self._run is None or hooked():
            self._slowly(tensors)
        else:
            self._run(*self._arguments(tensors))

    def bound(self, tensors: tuple[torch.Tensor | None, ...]) -> Bound | None:
        """What a call with these tensors on the current stream runs, without the tensors: the
        addresses are in it. None before the first call, and for launchers that take objects."""
        if self._run is None or not self._flat:
            return None
        return self._run, self._arguments(tensors)

    def _arguments(self, tensors: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
        addresses: Sequence[Any]
        if self._descriptors is None:
            addresses = [None if x is None else x.data_ptr() for x in tensors]
        else:
            addresses = self._descriptors.arguments(tensors)
        return (
            self._programs,
            1,
            1,
            current_stream(self._device),
            *self._middle,
            *addresses,
            *self._rest,
        )

    def _slowly(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        """The first call, or one that Triton's own code must see."""
        first = next(x for x in tensors if x is not None)
        if not first.is_cuda or not _compiles(self._kernel):
            self._through_jit(tensors)
            return
        key = self._key(tensors, first.get_device())
        kernel = _kernels.get(key)
        if kernel is not None and not hooked():
            self._bind(kernel, first.get_device())
            self(*tensors)
            return
        if kernel is not None:
            self._through_jit(tensors)
            return
        kernel = compiled_here(
            functools.partial(self._through_jit, tensors), self._kernel.fn.__name__
        )
        if hasattr(kernel, "packed_metadata"):
            _kernels[key] = kernel
            self._bind(kernel, first.get_device())

    def _through_jit(self, tensors: tuple[torch.Tensor | None, ...]) -> Any:
        arguments: list[Any] = list(tensors)
        for place, tile in self._tiles.items():
            base = arguments[place]
            arguments[place] = None if base is None else tile.descriptor(base)
        return self._kernel[(self._programs,)](*arguments, *self._rest, **self._options)

    def _key(self, tensors: tuple[torch.Tensor | None, ...], device: int) -> Hashable:
        """All that Triton compiles a kernel for: pointer types and alignment, widths of integers,
        constants, options."""
        pointers = tuple(None if x is None else (x.dtype, is_aligned(x)) for x in tensors)
        tiles = tuple((place, t.block, t.layout) for place, t in self._tiles.items())
        kinds = tuple(
            _kind(value) if loose else (type(value), value)
            for value, loose in zip(self._rest, _loose(self._kernel, len(tensors)), strict=True)
        )
        return (self._kernel, device, pointers, tiles, kinds, tuple(sorted(self._options.items())))

    def _bind(self, kernel: Any, device: int) -> None:
        """Take the kernel's launcher: `_run` is set last, since another thread may read it."""
        launcher = kernel.run
        with self._lock:
            self._device = device
            flat = _flat(launcher)
            self._flat = flat is not None
            if flat is None:
                self._descriptors = None
                if self._tiles:  # this release builds descriptors from objects of its own
                    self._descriptors = _Descriptors(self._tiles, None)
                self._middle = (kernel.function, kernel.packed_metadata, None, None, None)
                self._run = launcher
                return
            if self._tiles:
                self._descriptors = _Descriptors(self._tiles, kernel.metadata.tensordesc_meta)
            self._middle = (
                kernel.function,
                launcher.launch_cooperative_grid,
                launcher.launch_pdl,
                None,
                None,
                kernel.packed_metadata,
                None,
                None,
                None,
            )
            self._run = flat


class _Descriptors:
    """The leading arguments of a launch some of whose tensors are TMA descriptors.

    A descriptor holds an address. They are kept for the addresses that came together: in a loop the
    allocator gives the same ones again.

    Args:
        tiles: by place; meta: the compiled kernel's account of each descriptor, None where Triton
            fills them itself.
    """

    KEPT = 256

    def __init__(self, tiles: Mapping[int, Tiles], meta: Sequence[Any] | None) -> None:
        self._tiles = dict(sorted(tiles.items()))
        self._meta = None if meta is None else dict(zip(self._tiles, meta, strict=True))
        self._known: dict[tuple[int | None, ...], tuple[Any, ...]] = {}

    def arguments(self, tensors: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
        """The arguments as the launcher takes them: addresses, and for a descriptor itself, its
        sizes and its strides."""
        if self._meta is None:
            return tuple(
                self._tiles[place].descriptor(x) if place in self._tiles and x is not None else x
                for place, x in enumerate(tensors)
            )
        addresses = tuple([None if x is None else x.data_ptr() for x in tensors])
        made = self._known.get(addresses)
        if made is None:
            made = self._filled(addresses)
            if len(self._known) >= self.KEPT:
                self._known.clear()
            self._known[addresses] = made
        return made

    def _filled(self, addresses: tuple[int | None, ...]) -> tuple[Any, ...]:
        arguments: list[Any] = []
        for place, address in enumerate(addresses):
            if address is None or place not in self._tiles:
                arguments.append(address)
            else:
                arguments += self._fill(place, address)
        return tuple(arguments)

    def _fill(self, place: int, address: int) -> list[Any]:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        assert self._meta is not None
        tile, meta = self._tiles[place], self._meta[place]
        utils = cast(Any, triton.runtime.driver.active).utils
        filled = utils.fill_tma_descriptor(
            address,
            meta["swizzle"],
            meta["elem_size"],
            TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
            meta["block_size"],
            list(tile.shape),
            list(tile.strides),
            0,
        )
        return [filled, *tile.shape, *tile.strides]


def _flat(launcher: Any) -> Callable[..., None] | None:
    """The C function beneath a compiled kernel's launcher, which takes all arguments flat; None
    where this release's is not known, or the kernel wants scratch memory."""
    if not _FLAT_LAUNCHER or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    launch = launcher.launch
    cells = getattr(launch, "__closure__", None)
    if cells is None:
        return cast("Callable[..., None]", launch)
    # it fills TMA descriptors, then calls the C function
    beneath = dict(zip(launch.__code__.co_freevars, cells, strict=True)).get("launcher")
    return None if beneath is None else cast("Callable[..., None]", beneath.cell_contents)


_RUNTIME = knobs.runtime
_ENTER, _EXIT = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook


def hooked() -> bool:
    """Whether anybody listens to launches."""
    return (
        _RUNTIME.launch_enter_hook is not _ENTER
        or _RUNTIME.launch_exit_hook is not _EXIT
        or bool(getattr(_ENTER, "calls", _ENTER))
        or bool(getattr(_EXIT, "calls", _EXIT))
    )


def _compiles(kernel: Any) -> bool:
    """False in the interpreter."""
    return isinstance(kernel, triton.runtime.JITFunction)


@functools.cache
def _split(kernel: Any, named: frozenset[str]) -> tuple[list[str], list[str]]:
    """The kernel's leading arguments and those behind them, which are the named ones."""
    names = list(kernel.arg_names)
    count = len(names) - len(named)
    leading, behind = names[:count], names[count:]
    if set(behind) != named:
        odd = sorted(set(behind) ^ named)
        raise ValueError(f"numbers of {kernel} must be its last arguments; {odd} do not fit")
    return leading, behind


@functools.cache
def _loose(kernel: Any, leading: int) -> tuple[bool, ...]:
    """For each argument behind the tensors, whether only its kind is compiled in."""
    return tuple(not p.is_constexpr and p.do_not_specialize for p in kernel.params[leading:])


def _kind(value: Any) -> str:
    """What Triton makes of a number that it does not specialise on."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if -(2**31) <= value < 2**31:
            return "i32"
        return "i64" if value < 2**63 else "u64"
    return type(value).__name__
