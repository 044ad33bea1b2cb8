"""The parts of a call's cost on the host: the short way's, then the long way's."""

from __future__ import annotations

from typing import Any

from flashdig.bench.cell_inputs import CellInputs
from flashdig.bench.meters import Call


def parts_of(inputs: CellInputs) -> dict[str, Call]:
    """Name -> a call of this part alone, for a dense call with no option but `causal`.

    The short way is there where the problem's backend has plans.
    """
    import torch

    from flashdig.dispatch import choose
    from flashdig.ops.attention import planned_forward
    from flashdig.run import operator_inputs, request_of
    from flashdig.validate import Options, dense_call

    q, k, v = inputs.q, inputs.k, inputs.v
    options = Options(
        causal=inputs.cell.causal,
        window=None,
        softmax_scale=None,
        softcap=0.0,
        alibi_slopes=None,
        sinks=None,
        dropout_p=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        out_dtype=None,
        deterministic=False,
        return_lse=False,
    )
    call = dense_call(q, k, v, None, options)
    name = choose(call.problem, request_of(call, "auto"), "auto").name
    parts: dict[str, Call] = {}
    if name != "fused_cpu":
        arguments = operator_inputs(call, name)
        operator = torch.ops.flashdig.attention_forward.default
        plan = planned_forward(arguments)
        if plan is not None:
            parts = _short_way(inputs, plan, arguments)
        parts["operator: torch.library and what is below"] = lambda: operator(*arguments)
    return {
        **parts,
        "validation": lambda: dense_call(q, k, v, None, options),
        "dispatch": lambda: choose(call.problem, request_of(call, "auto"), "auto"),
    }


def _short_way(inputs: CellInputs, plan: Any, arguments: tuple[Any, ...]) -> dict[str, Call]:
    import torch

    from flashdig import kept_calls, kept_keys
    from flashdig.kernels.plans import replay_of
    from flashdig.ops.attention import TENSORS, planned_backward

    q, k, v = inputs.q, inputs.k, inputs.v
    given = (None, inputs.cell.causal, None, 0.0, 0.0, None, False, False, "auto")
    tensors = arguments[:TENSORS]
    out, lse = plan(*tensors)
    backward_arguments = (inputs.dout, None, *tensors, out, lse, *arguments[TENSORS:-2])
    backward_arguments += ((True, True, True, False, False), arguments[-1])
    backward = planned_backward(backward_arguments)

    def find() -> Any:
        return kept_calls.find(kept_keys.dense_key(q, k, v, None, None, None, *given))

    def allocate() -> Any:
        return torch.empty_like(q), torch.empty(lse.shape, dtype=lse.dtype, device=q.device)

    parts: dict[str, Call] = {
        "key: the call is found again": find,
        "out and lse allocated by torch.empty": allocate,
        "plan: allocation and launch": lambda: plan(*tensors),
    }
    device = q.get_device()
    replay = replay_of(plan, device, range(3), TENSORS)
    if replay is not None:
        parts["replay: out allocated, kept arguments"] = lambda: replay.first(q, k, v)
    if backward is not None:
        parts["plan of the backward: allocations and launches"] = lambda: backward(
            *backward_arguments[: TENSORS + 4]
        )
        there = [n for n, x in enumerate(backward_arguments[: TENSORS + 4]) if x is not None]
        again = replay_of(backward, device, there, TENSORS + 4)
        if again is not None:
            given_again = [backward_arguments[n] for n in there]
            parts["replay of the backward"] = lambda: again(*given_again)
    return parts
