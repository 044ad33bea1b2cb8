"""The three clocks: how n repetitions of one call are run and timed.

- host: `perf_counter` around eager calls. On a CPU that is the call; on a GPU it is what the call
  costs the host before the GPU starts, since only the ends are synchronised.
- events: CUDA events around eager calls, so a kernel shorter than its launch shows the launch.
- graph: CUDA events around a replayed CUDA graph that holds the repetitions: kernel time alone.

A meter prepares a call once; the prepared call is then measured as often as asked, two measurements
a time (A/A).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Clock = Literal["graph", "events", "host"]
L2 = Literal["warm", "cold"]
Call = Callable[[], object]

MAX_REPETITIONS = 1000
# Each is a flush of the L2 cache too; more of them only lengthen the run.
MAX_COLD_REPETITIONS = 50
# A CUDA stream accepts about a thousand launches ahead of the GPU, and an eager call may be twenty
# kernels; beyond that the host waits for the GPU and its own cost is no longer what is measured.
MAX_HOST_REPETITIONS_ON_GPU = 50
WARM_UP_CALLS = 3


class Prepared(Protocol):
    """A call that is ready to be measured: `enqueue` starts two measurements, `read` waits for them
    and returns both in milliseconds a call. Sensors are read in between, while the GPU works.
    `enqueued` counts the calls of both and those that run ahead of them."""

    @property
    def repetitions(self) -> int: ...
    @property
    def enqueued(self) -> int: ...
    def enqueue(self) -> None: ...
    def read(self) -> tuple[float, float]: ...


class Meter(Protocol):
    """Prepares calls for one clock. `recover` frees what a failed call has left behind, and raises
    when the device can no longer be used."""

    @property
    def clock(self) -> Clock: ...
    @property
    def l2(self) -> L2: ...
    def prepare(self, call: Call) -> Prepared: ...
    def recover(self) -> None: ...


def repetitions_for(target_ms: float, call_ms: float, most: int) -> int:
    """Calls that take about target_ms in all, from 1 to `most`."""
    return max(1, min(most, round(target_ms / max(call_ms, 1e-6))))


class HostMeter:
    """`now` (seconds) around eager calls, `synchronize` outside of the timed part.

    Args:
        target_ms: time that one measurement should take.
        now: monotonic clock in seconds.
        synchronize: waits for the device; nothing to do on a CPU.
        most: upper limit of repetitions in a measurement.
    """

    clock: Clock = "host"
    l2: L2 = "warm"

    def __init__(
        self,
        target_ms: float,
        *,
        now: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = lambda: None,
        most: int = MAX_REPETITIONS,
    ) -> None:
        self._target_ms = target_ms
        self._now = now
        self._synchronize = synchronize
        self._most = most

    def prepare(self, call: Call) -> Prepared:
        call()
        each = self.milliseconds(call, 1)
        return _HostTimed(self, call, repetitions_for(self._target_ms, each, self._most))

    def milliseconds(self, call: Call, repetitions: int) -> float:
        """Host milliseconds of one call, over `repetitions` of them."""
        self._synchronize()
        start = self._now()
        for _ in range(repetitions):
            call()
        end = self._now()
        self._synchronize()
        return (end - start) * 1e3 / repetitions

    def recover(self) -> None:
        self._synchronize()
        gc.collect()


class _HostTimed:
    def __init__(self, meter: HostMeter, call: Call, repetitions: int) -> None:
        self._meter = meter
        self._call = call
        self.repetitions = repetitions
        self.enqueued = 2 * repetitions
        self._measured = (0.0, 0.0)

    def enqueue(self) -> None:
        a = self._meter.milliseconds(self._call, self.repetitions)
        b = self._meter.milliseconds(self._call, self.repetitions)
        self._measured = (a, b)

    def read(self) -> tuple[float, float]:
        return self._measured


class Queue(Protocol):
    """What timing by events needs of a device."""

    def record(self) -> Any:
        """An event, recorded now in the queue; `later.since(earlier)` is for `elapsed`."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Milliseconds from one recorded event to another, both finished."""

    def synchronize(self) -> None: ...


class CudaQueue:
    """The current CUDA stream."""

    def record(self) -> torch.cuda.Event:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()


class EventTimed:
    """Launches between recorded events.

    Warm: one launch ahead, then two measurements of `launches` each, all queued without a pause, so
    that neither the first launch's latency nor an idle GPU is in the figures. Cold: every launch
    has a flush before it and an event on each side, and the two measurements take turns.

    Args:
        launch: enqueues `calls_per_launch` calls (a graph's replay) or one (the eager call).
        launches: per measurement.
        flush: evicts the L2 cache; None measures warm.
    """

    def __init__(
        self,
        queue: Queue,
        launch: Call,
        *,
        calls_per_launch: int = 1,
        launches: int = 1,
        flush: Call | None = None,
    ) -> None:
        self.repetitions = calls_per_launch * launches
        self.enqueued = 2 * self.repetitions + (calls_per_launch if flush is None else 0)
        self._queue = queue
        self._launch = launch
        self._launches = launches
        self._flush = flush
        self._spans: tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]] = ([], [])

    def enqueue(self) -> None:
        if self._flush is None:
            self._launch()
            marks = [self._queue.record()]
            for _ in range(2):
                for _ in range(self._launches):
                    self._launch()
                marks.append(self._queue.record())
            self._spans = ([(marks[0], marks[1])], [(marks[1], marks[2])])
            return
        self._spans = ([], [])
        for turn in range(2 * self._launches):
            self._flush()
            start = self._queue.record()
            self._launch()
            self._spans[turn % 2].append((start, self._queue.record()))

    def read(self) -> tuple[float, float]:
        self._queue.synchronize()
        a, b = (
            sum(self._queue.elapsed(start, end) for start, end in spans) / self.repetitions
            for spans in self._spans
        )
        self._spans = ([], [])
        return a, b


class FlushL2:
    """Evicts the L2 cache of the current GPU by reading a buffer of four times its size.

    Reading leaves clean lines behind. After a flush by writing, the call that follows would pay for
    the write-back. The buffer is at least 256 MB, so that the flush also lasts longer (about 0.1 ms
    on the fastest memory) than the host needs to launch what follows.
    """

    def __init__(self) -> None:
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = max(256_000_000, 4 * properties.L2_cache_size)
        self._buffer = torch.ones(size // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.zeros((), dtype=torch.float32, device="cuda")

    def __call__(self) -> None:
        import torch

        torch.sum(self._buffer, dim=0, out=self._sum)


class EventMeter:
    """CUDA events around eager calls on the current stream."""

    clock: Clock = "events"

    def __init__(self, target_ms: float, l2: L2 = "warm") -> None:
        self.l2: L2 = l2
        self._target_ms = target_ms
        self._queue = CudaQueue()
        self._flush = FlushL2() if l2 == "cold" else None

    def prepare(self, call: Call) -> Prepared:
        for _ in range(WARM_UP_CALLS):
            call()
        each, _ = _once(self._queue, call)
        most = MAX_REPETITIONS if self._flush is None else MAX_COLD_REPETITIONS
        launches = repetitions_for(self._target_ms, each, most)
        return EventTimed(self._queue, call, launches=launches, flush=self._flush)

    def recover(self) -> None:
        _free_cuda_memory()


class GraphMeter:
    """CUDA graphs on the current GPU, all in one memory pool.

    Warm: one graph holds all the repetitions of a measurement. Cold: a graph of one call is
    replayed after each flush, because a flush inside the graph would be timed with the call: events
    can be recorded around a replay, not around a part of it.

    Graphs share one memory pool, which therefore grows to the largest call and not to the sum of
    all: nothing reads their outputs, and they never run at the same time.
    """

    clock: Clock = "graph"

    def __init__(self, target_ms: float, l2: L2 = "warm") -> None:
        import torch

        self.l2: L2 = l2
        self._target_ms = target_ms
        self._queue = CudaQueue()
        self._flush = FlushL2() if l2 == "cold" else None
        self._counter = torch.zeros(1, device="cuda")
        self._must_renew = False
        self._renew_pool()

    def prepare(self, call: Call) -> Prepared:
        self._warm_up(call)
        # The eager call would show its launch cost, so the estimate comes from a graph too.
        graph = self._capture(call, 1)
        each = min(_once(self._queue, graph.replay))
        if self._flush is not None:
            launches = repetitions_for(self._target_ms, each, MAX_COLD_REPETITIONS)
            return EventTimed(self._queue, graph.replay, launches=launches, flush=self._flush)
        count = repetitions_for(self._target_ms, each, MAX_REPETITIONS)
        if count > 1:
            graph = self._capture(call, count)
        return EventTimed(self._queue, graph.replay, calls_per_launch=count)

    def recover(self) -> None:
        _free_cuda_memory()
        if self._must_renew:
            self._renew_pool()

    def _warm_up(self, call: Call) -> None:
        """Compilation, tuning and lazy initialisation, on a side stream as captures need it."""
        import torch

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()

    def _capture(self, call: Call, count: int) -> torch.cuda.CUDAGraph:
        import torch

        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        raised: Exception | None = None
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                try:
                    for _ in range(count):
                        call()
                except Exception as error:
                    raised = error
                    raise
        except Exception as error:
            if error is raised:
                raise
            # The call did what a capture forbids, and CUDA refused to end the capture: that error
            # hides the call's own, and torch leaves the capture's stream and pool in use.
            torch.cuda.set_stream(before)
            self._abandon(graph)
            raise (raised or error) from None
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        import torch

        self._must_renew = True
        # torch's allocators keep a pointer to a graph whose capture never ended
        _UNFINISHED_GRAPHS.append(graph)
        device = torch.cuda.current_device()
        try:
            torch._C._cuda_endAllocateToPool(device, self._pool)
        except RuntimeError:
            # the capture itself had ended and a later step failed: the pool is not held
            return
        torch._C._cuda_releasePool(device, self._pool)

    def _renew_pool(self) -> None:
        """A fresh stream and pool, kept alive by a first tiny graph.

        A pool that no graph uses cannot be used again. After an abandoned capture this first, sound
        one also ends the capture state of torch's random generator.
        """
        import torch

        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._warm_up(self._count)
        self._first = self._capture(self._count, 1)
        self._must_renew = False

    def _count(self) -> None:
        self._counter.add_(1)


_UNFINISHED_GRAPHS: list[torch.cuda.CUDAGraph] = []


def _once(queue: Queue, launch: Call) -> tuple[float, float]:
    """Milliseconds of two single launches, for estimates."""
    timed = EventTimed(queue, launch)
    timed.enqueue()
    return timed.read()


def _free_cuda_memory() -> None:
    import torch

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
