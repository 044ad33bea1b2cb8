"""A suite on a real GPU: every peer that is there, forward and backward, timed in CUDA graphs."""

import pytest
import torch

from flashdig.bench.cell_gate import GRADIENTS, cell_reference
from flashdig.bench.cell_inputs import make_inputs
from flashdig.bench.cells import Cell
from flashdig.bench.peers import peer
from flashdig.bench.run_suite import Plan, clock_for, run_suite
from flashdig.bench.suite import PEERS, Suite
from flashdig.bench.timing import Timing, time_rotated

pytestmark = pytest.mark.gpu

CELLS = {
    "causal": Cell(2, 8, 8, 1024, 1024, 128, 128, causal=True),
    "GQA": Cell(2, 8, 2, 1024, 1024, 64, 64),
    "window": Cell(1, 4, 4, 2048, 2048, 128, 128, causal=True, window=(255, 0)),
    "softcap": Cell(1, 4, 4, 1024, 1024, 128, 128, softcap=30.0),
    "ALiBi": Cell(1, 4, 4, 1024, 1024, 128, 128, causal=True, alibi=True),
    "float bias": Cell(1, 4, 4, 1024, 1024, 64, 64, bias="float"),
    "dropout": Cell(2, 8, 8, 1024, 1024, 64, 64, causal=True, dropout_p=0.1),
    "packed": Cell(3, 4, 4, 1000, 1000, 64, 64, causal=True, lengths=(300, 1000, 7)),
    "more keys": Cell(1, 4, 4, 256, 1024, 64, 64, causal=True),
    "float32": Cell(1, 4, 4, 512, 512, 64, 64, dtype="float32"),
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient", "sdpa_math", "flex"])
def test_torchs_peers_are_right_and_can_be_captured(name, cell) -> None:
    competitor = peer(name)
    reason = competitor.reason_against(cell, "cuda")
    if reason is not None:
        pytest.skip(reason)
    if name == "sdpa_efficient" and cell.num_heads != cell.num_heads_kv:
        pytest.skip("torch's memory-efficient backend shares no heads")
    inputs = make_inputs(cell, "cuda", 0, backward=True)
    reference = cell_reference(inputs)
    prepared = competitor.prepare(inputs)
    out = prepared.to_common(prepared.forward()())
    assert reference.check({"out": out}).reason == "ok"
    for call in (prepared.backward(), prepared.forward_backward()):
        gradients = map(prepared.to_common, call())
        assert reference.check(dict(zip(GRADIENTS, gradients, strict=True))).reason == "ok"
    calls = {"forward": prepared.forward(), "backward": prepared.backward()}
    for direction, call in calls.items():
        clock = clock_for(cell, direction, "cuda")
        timings = time_rotated({direction: call}, rounds=2, target_ms=0.2, clock=clock)
        assert isinstance(timings[direction], Timing), timings


def test_a_kept_graph_gives_the_same_gradients_in_every_replay() -> None:
    inputs = make_inputs(CELLS["causal"], "cuda", 0, backward=True)
    call = peer("sdpa_flash").prepare(inputs).backward()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [x.clone() for x in call()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = call()
    for x in captured:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for found, right in zip(captured, expected, strict=True):
        # dq is summed by atomics
        torch.testing.assert_close(found, right, rtol=0.02, atol=1e-3)


def test_a_suite_with_everyone() -> None:
    cells = (CELLS["causal"],)
    suite = Suite("test", "", cells, peers=PEERS, rounds=6, target_ms=0.5)
    plan = Plan(suite, cells, ("auto",))
    (result,) = run_suite(plan, "id", progress=lambda _: None)
    assert result.failures == []
    timed = {(row["pass"], row["backend"]): row for row in result.rows if "ms" in row}
    for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_math", "flex"):
        for direction in ("forward", "backward"):
            row = timed[direction, name]
            assert row["clock"] == "graph"
            assert row["peak_bytes"] > 0
    # the whole score matrix is what the fused ones do without
    memory = {name: row["peak_bytes"] for (direction, name), row in timed.items()
              if direction == "forward"}  # fmt: skip
    assert memory["sdpa_math"] > 4 * memory["sdpa_flash"]
    assert timed["forward", "sdpa_math"]["ms"] > timed["forward", "sdpa_flash"]["ms"]
