"""Which backend serves what, and the reasons given when it does not."""

import importlib

import pytest

from flashdig.dispatch import BACKENDS, Request, choose, support
from flashdig.ops.attention import LAUNCHERS
from flashdig.problem import AttentionProblem, Mask

HALF = AttentionProblem.dense(2, 8, 1024, 128)
FLOAT = HALF.replace(dtype="float32")
AMPERE = Request("cuda", (8, 0))
CPU = Request("cpu")


def reasons(name, problem, request):
    return next(why for backend, why in support(problem, request) if backend.name == name)


def test_names_are_unique_and_in_the_order_of_preference() -> None:
    names = [backend.name for backend in BACKENDS]
    assert names == [
        "fused_cpu",
        "hopper",
        "hopper_fp8",
        "triton",
        "tiled",
        "reference",
    ]
    by_name_only = [backend.name for backend in BACKENDS if not backend.in_auto]
    assert by_name_only == ["reference"]


@pytest.mark.parametrize(
    ("change", "request_change", "reason"),
    [
        ({"dtype": "float64"}, {}, "serves float16, bfloat16, float32, not float64"),
        ({"dtype": "float8_e4m3fn"}, {"descale": True}, "no descale factors"),
        ({"head_dim": 257}, {}, "head_dim must be between 1 and 256, not 257"),
        ({"head_dim_v": 320}, {}, "head_dim_v must be between 1 and 256, not 320"),
        ({"packed": True}, {"paged": True, "gradient": True}, "no gradients with page_table"),
        ({"packed": True, "dropout": True}, {"paged": True}, "no dropout with page_table"),
        ({}, {"triton": False}, "Triton is not installed"),
        ({}, {"compute_capability": (7, 5)}, "needs compute capability 8.0, the device has 7.5"),
        ({}, {"device_type": "xpu", "compute_capability": None}, "runs on NVIDIA GPUs, not on xpu"),
    ],
)
def test_what_triton_does_not_serve_goes_to_the_tiled_walk(change, request_change, reason) -> None:
    assert reasons("triton", HALF, AMPERE) == []
    problem = HALF.replace(**change)
    request = Request(**{**vars(AMPERE), **request_change})
    assert any(why.startswith(reason) for why in reasons("triton", problem, request))
    assert choose(problem, request).name == "tiled"
    with pytest.raises(ValueError, match="backend 'triton' cannot serve this call") as error:
        choose(problem, request, "triton")
    assert reason in str(error.value)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float16"},
        {"dtype": "float32", "allow_tf32": True},
        {"head_dim": 1, "head_dim_v": 256},
        {"packed": True, "mask": Mask(7, 0, "top-left")},
        {"softcap": 30.0, "alibi": "batch_heads", "bias": "bool", "sinks": True, "dropout": True},
        {"num_heads_kv": 2, "deterministic": True},
        {"seqlen_q": 0},
    ],
)
def test_triton_serves_the_rest_of_the_contract_since_ampere(change, capability) -> None:
    problem, request = HALF.replace(**change), Request("cuda", capability, return_lse=True)
    served_by_hopper = capability == (9, 0) and reasons("hopper", problem, request) == []
    assert choose(problem, request).name == ("hopper" if served_by_hopper else "triton")
    assert reasons("triton", problem, request) == []


HOPPER = Request("cuda", (9, 0), return_lse=True)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float16"},
        {"head_dim": 192},
        {"head_dim": 8, "head_dim_v": 256},
        {"packed": True, "mask": Mask(7, 0, "top-left")},
        {"softcap": 30.0, "alibi": "batch_heads", "sinks": True},
        {"num_heads_kv": 2, "deterministic": True},
        {"seqlen_q": 0},
    ],
)
def test_hopper_serves_sixteen_bits_on_sm_90(change) -> None:
    assert choose(HALF.replace(**change), HOPPER).name == "hopper"
    assert choose(HALF.replace(**change), HOPPER, "hopper").name == "hopper"
    assert choose(HALF.replace(**change), HOPPER, "triton").name == "triton"


@pytest.mark.parametrize(
    ("change", "request_change", "reason"),
    [
        ({"dtype": "float32"}, {}, "serves float16 and bfloat16, not float32"),
        ({"head_dim": 100}, {}, "head_dim must be a multiple of 8 between 8 and 256, not 100"),
        ({"head_dim_v": 4}, {}, "head_dim_v must be a multiple of 8 between 8 and 256, not 4"),
        ({"bias": "float"}, {}, "no bias"),
        ({"dropout": True}, {}, "no dropout"),
        ({"packed": True}, {"paged": True}, "no page_table"),
        ({}, {"descale": True}, "no descale factors"),
        ({}, {"out_dtype": "float32"}, "out_dtype is always the dtype of q, not float32"),
        ({}, {"compute_capability": (8, 0)}, "needs compute capability 9.0, the device has 8.0"),
        ({}, {"compute_capability": (10, 0)}, "needs compute capability 9.0, the device has 10.0"),
        ({}, {"device_type": "cpu", "compute_capability": None}, "runs on NVIDIA GPUs, not on cpu"),
        ({}, {"triton": False}, "Triton is not installed"),
    ],
)
def test_what_hopper_does_not_serve(change, request_change, reason) -> None:
    problem = HALF.replace(**change)
    request = Request(**{**vars(HOPPER), **request_change})
    assert reasons("hopper", problem, request) == [reason]
    assert choose(problem, request).name != "hopper"
    with pytest.raises(ValueError, match="backend 'hopper' cannot serve this call"):
        choose(problem, request, "hopper")


@pytest.mark.parametrize(
    ("change", "request_change", "reason"),
    [
        ({"dtype": "bfloat16"}, {}, "serves float8_e4m3fn, not bfloat16"),
        ({"dtype": "float8_e5m2"}, {}, "serves float8_e4m3fn, not float8_e5m2"),
        ({"head_dim": 72}, {}, "head_dim must be a multiple of 16 between 16 and 256, not 72"),
        ({"bias": "bool"}, {}, "no bias"),
        ({"packed": True}, {"paged": True}, "no page_table"),
        ({}, {"out_dtype": "float32"}, "out_dtype must be float16 or bfloat16, not float32"),
        ({}, {"compute_capability": (8, 9)}, "needs compute capability 9.0, the device has 8.9"),
    ],
)
def test_what_the_fp8_forward_does_not_serve(change, request_change, reason) -> None:
    served = HALF.replace(dtype="float8_e4m3fn", packed=True, softcap=5.0, sinks=True)
    request = Request("cuda", (9, 0), descale=True, out_dtype="float16")
    assert choose(served, request).name == "hopper_fp8"
    found = reasons(
        "hopper_fp8", served.replace(**change), Request(**{**vars(request), **request_change})
    )
    assert found == [reason]


def test_the_interpreter_serves_what_it_multiplies_rightly() -> None:
    interpreted = Request("cpu", interpreter=True)
    assert reasons("triton", FLOAT, interpreted) == []
    assert reasons("triton", FLOAT.replace(dtype="float16"), interpreted) == []
    assert reasons("triton", HALF, interpreted) == ["serves float16, float32, not bfloat16"]
    assert "TRITON_INTERPRET=1" in reasons("triton", FLOAT, CPU)[0]


def test_the_fused_cpu_attention_serves_plain_problems_alone() -> None:
    assert choose(FLOAT, CPU).name == "fused_cpu"
    assert choose(FLOAT.replace(mask=Mask(window_right=0)), CPU).name == "fused_cpu"
    for change in (
        {"packed": True},
        {"num_heads_kv": 2},
        {"head_dim_v": 64},
        {"mask": Mask(5, 0)},
        {"mask": Mask(window_right=0), "seqlen_q": 5},
        {"softcap": 1.0},
        {"seqlen_k": 0},
        {"dtype": "float64"},
    ):
        assert choose(FLOAT.replace(**change), CPU).name == "tiled", change
    assert choose(FLOAT, Request("cpu", return_lse=True)).name == "tiled"
    assert choose(FLOAT, Request("cpu", out_dtype="float64")).name == "tiled"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    names = "'fused_cpu', 'hopper', 'hopper_fp8', 'triton', 'tiled', 'reference'"
    with pytest.raises(ValueError, match=f"must be 'auto' or one of {names}"):
        choose(HALF, AMPERE, "flash")


def test_hopper_has_a_backward_whose_gradients_are_the_same_bits() -> None:
    assert choose(HALF, HOPPER).name == "hopper"
    forward, backward = LAUNCHERS["hopper_deterministic"]
    assert forward == LAUNCHERS["hopper"][0]
    assert backward != LAUNCHERS["hopper"][1]
    assert callable(importlib.import_module(backward).attention_backward)
