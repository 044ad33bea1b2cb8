"""Running a suite on the CPU: failures are told apart, nobody wrong is timed, rows are sound."""

import pytest
import torch

from flashdig.bench import run_suite as run_module
from flashdig.bench.cells import Cell
from flashdig.bench.competitors import Ours, Prepared
from flashdig.bench.peers import SdpaFlash
from flashdig.bench.results import Record, new_run
from flashdig.bench.run_suite import Plan, run_suite
from flashdig.bench.standings import standings
from flashdig.bench.suite import Suite

CELL = Cell(1, 2, 1, 24, 24, 16, 16, dtype="float32", causal=True)
RUN = new_run("flashdig bench test", {}, None)


def suite(*cells: Cell, **changes) -> Suite:
    return Suite("test", "", cells or (CELL,),
                 **{"peers": ("sdpa_math",), "ours": ("tiled",), "rounds": 2, "target_ms": 0.01,
                    **changes})  # fmt: skip


def run(of: Suite, **changes):
    plan = Plan(of, of.cells, of.ours, **changes)
    return list(run_suite(plan, RUN.run_id, progress=lambda _: None))


class Fake:
    """A peer that computes what it is told to."""

    def __init__(self, name: str, attention, reason: str | None = None, prepare_error=None) -> None:
        self.name = name
        self._attention = attention
        self._reason = reason
        self._prepare_error = prepare_error

    def reason_against(self, cell: Cell, device_type: str) -> str | None:
        return self._reason

    def prepare(self, inputs) -> Prepared:
        if self._prepare_error is not None:
            raise self._prepare_error
        return Prepared(self._attention, (inputs.q, inputs.k, inputs.v), inputs.dout)


@pytest.fixture
def peers(monkeypatch):
    """Replace the peers by fakes: names as in `Suite.peers`."""

    def install(**fakes: Fake) -> None:
        monkeypatch.setattr(run_module, "peer", lambda name: fakes[name])

    return install


def right(q, k, v):
    return Ours("tiled").prepare(run_module.make_inputs(CELL, "cpu", 0, True)).attention(q, k, v)


def raises(error: Exception):
    def attention(q, k, v):
        raise error

    return attention


def test_rows_hold_problem_verdict_and_time_and_fit_a_record() -> None:
    (result,) = run(suite(measure=("time", "memory")))
    assert result.failures == []
    assert [(row["pass"], row["backend"]) for row in result.rows] == [
        ("forward", "tiled"),
        ("forward", "sdpa_math"),
        ("backward", "tiled"),
        ("backward", "sdpa_math"),
    ]
    for row in result.rows:
        assert row["gate"] == "ok"
        assert row["clock"] == "host"
        assert len(row["ms_all"]) == 2
        flops = CELL.flops(row["pass"])
        assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9)
        assert 0 < row["error"] < row["allowed_error"] < 2e-5
        assert "compared: 1 of 1" in row["notes"]
        assert "peak_bytes" not in row  # a CPU's allocator counts nothing
    Record("test").with_run(RUN, result.rows)


def test_every_way_to_fail_is_told_apart_and_never_timed(peers) -> None:
    peers(
        sdpa_math=Fake("sdpa_math", right),
        sdpa_flash=Fake("sdpa_flash", lambda q, k, v: 1.1 * right(q, k, v)),
        sdpa_cudnn=Fake("sdpa_cudnn", right, reason="needs a CUDA device"),
        sdpa_efficient=Fake("sdpa_efficient", raises(NotImplementedError("no kernel\nmore"))),
        flex=Fake("flex", right, prepare_error=ValueError("cannot compile")),
        fa3=Fake("fa3", lambda q, k, v: right(q, k, v).detach()),
    )
    names = ("sdpa_math", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "fa3")
    (result,) = run(suite(peers=names))
    rows = {(row["pass"], row["backend"]): row for row in result.rows}
    for direction in ("forward", "backward"):
        assert "ms" in rows[direction, "sdpa_math"]
        assert "is above the allowed" in rows[direction, "sdpa_flash"]["gate"]
        assert rows[direction, "sdpa_cudnn"]["gate"] == "not run: needs a CUDA device"
        assert rows[direction, "sdpa_efficient"]["gate"] == "error: NotImplementedError: no kernel"
        assert rows[direction, "flex"]["gate"] == "error: ValueError: cannot compile"
        for name in names[1:5]:
            assert "ms" not in rows[direction, name]
    # a forward without a backward is timed where it works
    assert "ms" in rows["forward", "fa3"]
    assert rows["backward", "fa3"]["gate"].startswith("error: RuntimeError: element 0")
    # peers' failures are no failures of ours
    assert result.failures == []
    for one in standings(result.rows):
        assert set(one.ratios) == {"sdpa_math"} | (
            {"fa3"} if one.any_row["pass"] == "forward" else set()
        )


def test_why_torch_has_no_kernel_stands_in_the_row() -> None:
    # the fused CPU kernel has no dropout; it is asked in spite of that
    cell = Cell(1, 2, 2, 24, 24, 16, 16, dtype="float32", dropout_p=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SdpaFlash, "reason_against", lambda *_: None)
        (result,) = run(suite(cell, peers=("sdpa_flash",), passes=("forward",)))
    gate = result.rows[1]["gate"]
    assert gate.startswith("error: RuntimeError: No available kernel")
    assert "non-zero dropout" in gate
    assert "Triggered" not in gate


def test_our_failures_are_reported(monkeypatch) -> None:
    prepare = Ours.prepare

    def doubled(self, inputs):
        prepared = prepare(self, inputs)
        twice = lambda q, k, v: 2 * prepared.attention(q, k, v)  # noqa: E731
        return Prepared(twice, prepared.tensors, prepared.dout)

    monkeypatch.setattr(Ours, "prepare", doubled)
    (result,) = run(suite(passes=("forward",)))
    (failure,) = result.failures
    assert failure.startswith("tiled on batch 1")
    assert "forward: error of out" in failure
    assert "ms" not in result.rows[0]


def test_a_refusal_of_ours_is_no_failure() -> None:
    cell = Cell(1, 2, 2, 24, 24, 16, 16, dtype="float32", softcap=3.0)
    (result,) = run(suite(cell, ours=("fused_cpu",), peers=()))
    assert result.failures == []
    assert all(row["gate"].startswith("not run: ") for row in result.rows)


def test_a_call_that_fails_only_while_it_is_timed_has_no_time(monkeypatch, peers) -> None:
    calls = {"count": 0}

    def tires(q, k, v):
        calls["count"] += 1
        if calls["count"] > 1:
            raise RuntimeError("out of breath")
        return right(q, k, v)

    peers(fa3=Fake("fa3", tires))
    (result,) = run(suite(passes=("forward",), peers=("fa3",)))
    row = result.rows[1]
    assert row["gate"] == "ok"
    assert "ms" not in row
    assert "no time: preparing: RuntimeError: out of breath" in row["notes"]
    assert "ms" in result.rows[0]


def test_memory_alone_times_nothing() -> None:
    (result,) = run(suite(measure=("memory",)))
    assert all("ms" not in row for row in result.rows)
    assert all("memory alone" in row["notes"] for row in result.rows)
    Record("test").with_run(RUN, result.rows)


def test_a_cells_own_passes_peers_and_rounds() -> None:
    cell = Cell(1, 2, 2, 16, 16, 8, 8, dtype="float32", passes=("forward",), peers=(), rounds=3)
    (result,) = run(suite(cell))
    assert [(row["pass"], row["backend"], len(row["ms_all"])) for row in result.rows] == [
        ("forward", "tiled", 3)
    ]
    (result,) = run(suite(cell), peers=("sdpa_math",), rounds=1)
    assert [(row["backend"], len(row["ms_all"])) for row in result.rows] == [
        ("tiled", 1),
        ("sdpa_math", 1),
    ]


def test_the_time_limit_begins_no_cell_that_would_not_fit(monkeypatch) -> None:
    clock = iter([0.0, 0.0, 0.0, 4.0, 4.0, 8.0, 8.0, 100.0, 100.0])
    monkeypatch.setattr(run_module, "measure_cell", lambda *_: [])
    of = suite(*[CELL] * 5)
    done = list(run_suite(Plan(of, of.cells, (), time_limit=10.0), "id", progress=lambda _: None,
                          now=lambda: next(clock)))  # fmt: skip
    assert len(done) == 2


def test_a_lost_gpu_ends_the_run_and_names_who_lost_it(monkeypatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    run_module._require_device("cpu", "anyone")
    with pytest.raises(run_module.DeviceLostError, match="lost after fa4: CUDA error"):
        run_module._require_device("cuda", "fa4")


def test_utilisation_is_of_the_tensor_cores_at_the_clock_that_was_seen(monkeypatch) -> None:
    row = {"dtype": "bfloat16", "tflops": 132 * 4096 * 1500e6 / 1e12 / 2, "sm_clock_mhz": 1500.0}
    assert run_module._utilisation(row) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert run_module._utilisation(row) == pytest.approx(0.5)
    assert run_module._utilisation({**row, "sm_clock_mhz": None}) is None
    assert run_module._utilisation({**row, "dtype": "float32"}) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU of tomorrow")
    assert run_module._utilisation(row) is None


def test_an_interruption_is_not_swallowed(peers) -> None:
    def interrupted(q, k, v):
        raise KeyboardInterrupt

    peers(fa3=Fake("fa3", interrupted))
    with pytest.raises(KeyboardInterrupt):
        run(suite(peers=("fa3",)))


def test_outputs_are_poisoned_before_they_are_checked(peers) -> None:
    def leaves_rows_unwritten(q, k, v):
        out = torch.empty_like(q)
        out[:, :-1] = right(q, k, v)[:, :-1]
        return out

    peers(fa3=Fake("fa3", leaves_rows_unwritten))
    (result,) = run(suite(passes=("forward",), peers=("fa3",)))
    assert result.rows[1]["gate"] == "out has values that are NaN or infinite"
