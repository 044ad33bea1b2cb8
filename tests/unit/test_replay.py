"""Replayed launches: what is kept, for which addresses, when a plan runs its launches itself."""

from types import SimpleNamespace

import pytest
import torch

from flashdig.kernels import plans, replay
from flashdig.kernels.plans import replay_of


class Launch:
    """Writes the sum of what it reads. `called`: how often its arguments were worked out."""

    def __init__(self):
        self.called, self.ran, self.is_flat = 0, [], True

    def __call__(self, *tensors):
        self.called += 1
        *read, first, second = (x for x in tensors if x is not None)
        first.copy_(sum(x.flatten()[0] for x in read) * torch.ones_like(first))
        second.view(-1)[: first.numel()] = -first.view(-1)

    def bound(self, tensors):
        assert tensors.count(None) == 2
        if not self.is_flat:
            return None
        self.called += 1
        return self.run, (tensors, tuple(x.data_ptr() for x in tensors if x is not None))

    def run(self, tensors, addresses):
        self.ran.append(addresses)
        self(*tensors)
        self.called -= 1


class Plan:
    """Of five arguments, the first two and the fourth None."""

    counts = False

    def __init__(self, size=4):
        self.launch = Launch()
        self.pool = [torch.empty(size) for _ in range(2)]
        self.makes = tuple(lambda x=x: x for x in self.pool)

    def launches(self, tensors, made):
        assert len(tensors) == 5
        return [(self.launch, (*tensors, *made))]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """State of a pretended GPU."""
    plans.forget()
    state = SimpleNamespace(stream=7, capturing=False, hooked=False)
    monkeypatch.setattr(replay, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(replay, "_capturing", lambda: state.capturing)
    monkeypatch.setattr(replay, "hooked", lambda: state.hooked)
    monkeypatch.setattr(replay, "_unread", {})
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    yield state
    plans.forget()


PLACES = (1, 2, 4)


def made(plan, device=0):
    return replay_of(plan, device, PLACES, 5)


def tensors(value=1.0):
    return [torch.full((4,), value) for _ in PLACES]


def test_what_came_together_before_is_replayed() -> None:
    plan = Plan()
    again = made(plan)
    x, y = tensors(1.0), tensors(2.0)
    for given, expected in ((x, 3.0), (y, 6.0), (x, 3.0), (y, 6.0)):
        out, lse = again(*given)
        assert torch.equal(out, torch.full((4,), expected))
        assert torch.equal(lse, -out)
    assert plan.launch.called == 2
    addresses = [tuple(t.data_ptr() for t in given) for given in (x, y, x, y)]
    assert [ran[:3] for ran in plan.launch.ran] == addresses


def test_another_order_stream_result_or_plan_is_another_launch(gpu) -> None:
    plan = Plan()
    again = made(plan)
    x = tensors()
    again(*x)
    again(*x)
    assert plan.launch.called == 1
    again(x[1], x[0], x[2])
    assert plan.launch.called == 2
    gpu.stream = 8
    again(*x)
    assert plan.launch.called == 3
    plan.pool[0] = torch.empty(4)
    again = made(SimpleNamespace(makes=(lambda: plan.pool[0], plan.makes[1]), counts=False,
                                 launches=plan.launches))  # fmt: skip
    again(*x)
    assert plan.launch.called == 4
    other = Plan()
    other.makes = plan.makes
    made(other)(*x)
    assert other.launch.called == 1


def test_listeners_captures_and_launchers_of_objects(gpu) -> None:
    plan = Plan()
    again = made(plan)
    x = tensors()
    again(*x)
    gpu.hooked = True
    again(*x)
    assert plan.launch.called == 2
    gpu.hooked, gpu.capturing = False, True
    again(*x)
    assert plan.launch.called == 2  # nothing in it depends on the capture
    plan.counts = True
    again(*x)
    assert plan.launch.called == 3
    gpu.capturing = False
    again(*x)
    assert plan.launch.called == 3
    plan.launch.is_flat = False
    plans.forget()
    again(*x)
    again(*x)
    assert plan.launch.called == 5
    assert len(plans.kept_arguments) == 0


def test_elsewhere_than_on_a_gpu_nothing_is_kept() -> None:
    plan = Plan()
    again = made(plan, device=-1)
    x = tensors()
    for _ in range(3):
        again(*x)
        assert torch.equal(again.first(*x), torch.full((4,), 3.0))
    assert plan.launch.called == 6
    assert len(plans.kept_arguments) == 0


def test_what_nobody_reads_is_written_to_one_place(gpu, monkeypatch) -> None:
    plan = Plan()
    again = made(plan)
    x = tensors()
    gpu.capturing = True
    again.first(*x)
    assert not replay._unread  # memory of the graph's
    gpu.capturing = False
    again.first(*x)
    assert replay._unread[0].nbytes == replay.UNREAD_BYTES
    plan.pool[1].fill_(5.0)
    assert torch.equal(again.first(*x), torch.full((4,), 3.0))
    assert torch.equal(plan.pool[1], torch.full((4,), 5.0))
    assert torch.equal(replay._unread[0][:4], torch.full((4,), -3.0))
    gpu.capturing = True
    again.first(*x)
    assert torch.equal(plan.pool[1], torch.full((4,), -3.0))
    gpu.capturing = False
    monkeypatch.setattr(replay, "UNREAD_BYTES", 8)
    large = Plan()
    again = made(large)
    for _ in range(2):
        large.pool[1].fill_(5.0)
        again.first(*x)
        assert torch.equal(large.pool[1], torch.full((4,), -3.0))


def test_plans_without_launches_have_no_replay() -> None:
    assert made(lambda *tensors: None) is None
    assert made(SimpleNamespace(makes=(), launches=lambda *a: [])) is None
