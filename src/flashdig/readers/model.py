"""The model of a recording that every trace reader fills and everything behind the readers uses.

One `Trace` is what one process (one rank) recorded: device work, the host calls that launched it,
and the host operators around those calls. Times are integer nanoseconds on the recorder's own
clock; only differences mean something (`Trace.base_time_ns` leads to wall-clock time). What the
file does not say is None, never 0.

A recording holds millions of events, so the classes have slots, and what repeats (launch
configurations, operator inputs, names) is one shared object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Dimensions = tuple[int, int, int]
HostKind = Literal["operator", "annotation", "python"]


@dataclass(frozen=True)
class DeviceProperties:
    """One GPU as the recording describes it; what is missing there is None.

    Attributes:
        index: device number within the process.
        compute_capability: (major, minor), such as (9, 0).
        num_sms: streaming multiprocessors.
        max_threads_per_sm, registers_per_sm, shared_memory_per_sm: limits of one SM
            (registers are 32-bit, shared memory in bytes).
        max_shared_memory_per_block: largest shared memory a block may opt in to, bytes.
        warp_size: threads in a warp.
        memory_bytes: device memory.
    """

    index: int
    name: str | None = None
    compute_capability: tuple[int, int] | None = None
    num_sms: int | None = None
    max_threads_per_sm: int | None = None
    registers_per_sm: int | None = None
    shared_memory_per_sm: int | None = None
    max_shared_memory_per_block: int | None = None
    warp_size: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class LaunchConfiguration:
    """How a kernel was launched; one object is shared by all kernels launched alike.

    Attributes:
        grid, block: (x, y, z) in blocks and threads.
        registers_per_thread: 32-bit registers.
        shared_memory_bytes: static and dynamic together, per block.
        occupancy_percent: the recorder's *estimate* of resident warps, 0 to 100; None where the
            file has none or a negative one. 0 is ambiguous: see `readers.occupancy`.
    """

    grid: Dimensions | None = None
    block: Dimensions | None = None
    registers_per_thread: int | None = None
    shared_memory_bytes: int | None = None
    occupancy_percent: float | None = None

    @property
    def num_blocks(self) -> int | None:
        return None if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads_per_block(self) -> int | None:
        return None if self.block is None else self.block[0] * self.block[1] * self.block[2]


@dataclass(frozen=True)
class OperatorInputs:
    """Inputs of a host operator as recorded with `record_shapes`, one entry an argument.

    Attributes:
        shapes: a tuple of sizes for a tensor, a tuple of such tuples for a list of tensors, () for
            scalars and absent tensors.
        dtypes: as recorded: "c10::BFloat16", "float", "Scalar", "ScalarList", "TensorList", "".
        strides: like shapes, in elements.
        values: text of scalar arguments ("True", "-1", "[4, 16]"), "" for tensors.
    """

    shapes: tuple[tuple[object, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    strides: tuple[tuple[object, ...], ...] = ()
    values: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class HostOp:
    """A stretch of host time with a name: an operator, an annotation, or a Python call.

    Attributes:
        name: "aten::matmul", "ProfilerStep#3", "nn.Module: Linear_0", "train.py(12): forward", …
        kind: "operator" (dispatcher, autograd nodes), "annotation" (`record_function`, NVTX) or
            "python" (frames and modules recorded with stacks).
        thread: number of the operating system's thread.
        inputs: None where shapes were not recorded.
        external_id: the recorder's number that ties device work to this operator.
        sequence: autograd sequence number: a forward operator and its backward node share it.
        forward_thread: of a backward node, the recorder's number of the thread that ran its
            forward (not `thread`'s numbering); 0 or None for forward operators.
        call_stack: frames as recorded on the operator itself, outermost first, or None.
        parent: innermost host op of the same thread that encloses this one.
        forward: of a backward node, the forward operator that created it.
    """

    name: str
    kind: HostKind
    start_ns: int
    duration_ns: int
    thread: int
    inputs: OperatorInputs | None = None
    external_id: int | None = None
    sequence: int | None = None
    forward_thread: int | None = None
    call_stack: str | None = None
    parent: HostOp | None = field(default=None, repr=False)
    forward: HostOp | None = field(default=None, repr=False)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def is_backward(self) -> bool:
        """True for an autograd node that ran in a backward pass."""
        return bool(self.forward_thread) or self.name.startswith("autograd::engine::evaluate_")

    def ancestors(self) -> Iterator[HostOp]:
        """The enclosing host ops, innermost first, without this one."""
        op = self.parent
        while op is not None:
            yield op
            op = op.parent

    def root(self) -> HostOp:
        """The outermost *operator* around this op (annotations and Python frames left out)."""
        outermost = self
        for op in self.ancestors():
            if op.kind == "operator":
                outermost = op
        return outermost

    def module_path(self) -> tuple[str, ...]:
        """Modules around this op, outermost first, such as ("LlamaModel_0", "LlamaAttention_3").

        A module's own frame counts as around itself.

        From recorded `nn.Module` frames; of a backward node, those around its forward. Empty where
        stacks were not recorded.
        """
        path = [
            op.name.removeprefix("nn.Module: ")
            for op in (self, *self.ancestors())
            if op.kind == "python" and op.name.startswith("nn.Module: ")
        ]
        if path:
            return tuple(reversed(path))
        for op in (self, *self.ancestors()):
            if op.forward is not None:
                return op.forward.module_path()
        return ()

    def annotations(self) -> tuple[str, ...]:
        """Names of the annotations around this op on its own thread, outermost first.

        An annotation counts as around itself.
        """
        around = (self, *self.ancestors())
        return tuple(reversed([op.name for op in around if op.kind == "annotation"]))

    def stack_frames(self) -> tuple[str, ...]:
        """Python frames around this op, outermost first; empty where stacks were not recorded."""
        frames = tuple(reversed([op.name for op in self.ancestors() if op.kind == "python"]))
        if not frames and self.call_stack:
            return tuple(self.call_stack.split(";"))
        return frames


@dataclass(slots=True, eq=False)
class Launch:
    """A host call into the CUDA (or HIP) runtime or driver: launches, copies, synchronisations.

    Attributes:
        name: "cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync", …
        correlation: number shared with the device work it started; None where not recorded.
        op: innermost host op around the call.
        device_events: kernels, copies and memsets that it started.
    """

    name: str
    start_ns: int
    duration_ns: int
    thread: int
    correlation: int | None = None
    external_id: int | None = None
    op: HostOp | None = field(default=None, repr=False)
    device_events: int = 0

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def is_graph_launch(self) -> bool:
        return "GraphLaunch" in self.name

    @property
    def is_kernel_launch(self) -> bool:
        """True for a call whose purpose is to start a kernel or a graph of kernels."""
        return "Launch" in self.name and "HostFunc" not in self.name

    @property
    def is_synchronization(self) -> bool:
        """True for a call in which the host waits for the device."""
        return "Synchronize" in self.name or self.name in {"cudaMemcpy", "hipMemcpy"}


@dataclass(slots=True, eq=False)
class Kernel:
    """A kernel as it ran on the device.

    Attributes:
        name: as recorded, demangled, template arguments and all.
        stream: CUDA stream number; None where not recorded.
        correlation: number shared with its launch; the kernels of one graph launch share it too.
        configuration: grid, block, registers, shared memory, occupancy estimate.
        graph_id: number of the executable graph it belongs to, where recorded.
        launch: the host call that started it; None where that is not in the file.
        op: the host op that asked for it (innermost); None where it cannot be told.
    """

    name: str
    start_ns: int
    duration_ns: int
    device: int
    stream: int | None
    configuration: LaunchConfiguration
    correlation: int | None = None
    external_id: int | None = None
    graph_id: int | None = None
    launch: Launch | None = field(default=None, repr=False)
    op: HostOp | None = field(default=None, repr=False)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def grid(self) -> Dimensions | None:
        return self.configuration.grid

    @property
    def block(self) -> Dimensions | None:
        return self.configuration.block

    @property
    def registers_per_thread(self) -> int | None:
        return self.configuration.registers_per_thread

    @property
    def shared_memory_bytes(self) -> int | None:
        return self.configuration.shared_memory_bytes

    @property
    def occupancy_percent(self) -> float | None:
        return self.configuration.occupancy_percent

    @property
    def graph_launch(self) -> Launch | None:
        """The graph launch that ran it, or None when it was launched by itself (or unknown)."""
        return self.launch if self.launch is not None and self.launch.is_graph_launch else None


@dataclass(slots=True, eq=False)
class Copy:
    """A memcpy or memset as it ran on the device.

    Attributes:
        name: as recorded: "Memcpy DtoD (Device -> Device)", "Memset (Device)", …
        kind: "memcpy" or "memset".
        num_bytes: None where not recorded.
        launch, op: as for `Kernel`.
    """

    name: str
    kind: Literal["memcpy", "memset"]
    start_ns: int
    duration_ns: int
    device: int
    stream: int | None
    num_bytes: int | None = None
    correlation: int | None = None
    external_id: int | None = None
    launch: Launch | None = field(default=None, repr=False)
    op: HostOp | None = field(default=None, repr=False)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


DeviceEvent = Kernel | Copy


@dataclass(frozen=True)
class DeviceAnnotation:
    """A range that the recorder drew on a device lane; it is no kernel and counts in no sum."""

    name: str
    start_ns: int
    duration_ns: int
    device: int | None
    stream: int | None


@dataclass(frozen=True)
class ClippedEvent:
    """A device event whose recorded end lies behind its successor's on the same stream.

    `event.duration_ns` is the corrected duration (up to the successor's start);
    `recorded_duration_ns` is what the file says.
    """

    event: DeviceEvent
    recorded_duration_ns: int


@dataclass(frozen=True)
class ReadWarning:
    """Something about the file that the reader had to work around.

    Attributes:
        code: short and stable: "truncated", "bad_bytes", "clipped_duration", …
        message: one sentence for people, with numbers.
    """

    code: str
    message: str


@dataclass(slots=True, eq=False)
class Trace:
    """Everything one process recorded, linked: kernels to launches to host ops.

    All lists are in order of start time. `host_ops` holds operators, annotations and Python
    frames; `annotations` are those of kind "annotation" again, for convenience.

    Attributes:
        source: file name, for messages.
        format: "kineto" or "nsight-systems".
        rank: from the file, else from its name, else its place among the files read.
        world_size: number of ranks of the run; None where not recorded.
        rank_is_recorded: False where the rank was guessed from the name or the order.
        base_time_ns: what to add to times for nanoseconds since 1970; None where not recorded.
        clipped: device events whose recorded duration was impossible.
        incomplete: True when the file ends early and only what came before was read.
        peak_allocated_bytes: highest total of device memory seen in the allocator's events.
    """

    source: str
    format: Literal["kineto", "nsight-systems"]
    rank: int = 0
    world_size: int | None = None
    rank_is_recorded: bool = False
    kernels: list[Kernel] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    host_ops: list[HostOp] = field(default_factory=list)
    annotations: list[HostOp] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    device_annotations: list[DeviceAnnotation] = field(default_factory=list)
    devices: list[DeviceProperties] = field(default_factory=list)
    clipped: list[ClippedEvent] = field(default_factory=list)
    warnings: list[ReadWarning] = field(default_factory=list)
    base_time_ns: int | None = None
    incomplete: bool = False
    peak_allocated_bytes: int | None = None
    metadata: dict[str, str | int | bool] = field(default_factory=dict)

    def device_events(self) -> list[DeviceEvent]:
        """Kernels, copies and memsets in order of start time."""
        events: list[DeviceEvent] = [*self.kernels, *self.copies]
        events.sort(key=lambda event: (event.start_ns, event.duration_ns))
        return events

    def device(self, index: int) -> DeviceProperties | None:
        """Properties of device `index`, or None where the file has none."""
        return next((device for device in self.devices if device.index == index), None)
