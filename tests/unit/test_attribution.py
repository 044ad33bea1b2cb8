"""Attribution on real recordings: every attention found, as often as the code ran it.

The recordings: `attn_*` ran one attention three times (`attn_train_*` with its backward); the
models have three layers, ran two steps, and the generating one made eight tokens a step.
"""

import gzip
import json
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdig.problem import Mask
from flashdig.readers.attribution import AttentionCall, MaskUse, Sizes, attention_calls
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import (
    Copy,
    HostKind,
    HostOp,
    Kernel,
    Launch,
    LaunchConfiguration,
    OperatorInputs,
    Trace,
)
from flashdig.readers.trace import read_kineto
from tests.trace_files import recorded

BFLOAT16 = "bfloat16"
ARTICLE = Sizes(4, 16, 16, 2048, 2048, 64, 64, BFLOAT16)
BERT = Sizes(2, 8, 8, 512, 512, 64, 64, BFLOAT16)
LLAMA = Sizes(2, 8, 2, 512, 512, 64, 64, BFLOAT16)
TOP_LEFT = MaskUse("causal", "top-left")
BOTTOM_RIGHT = MaskUse("causal", "bottom-right")
NO_MASK = MaskUse("none")

# file -> (forward calls, backward calls, backend, sizes, mask, events of one forward, of one
# backward)
EXPECTED = {
    # 5 kernels, the copy of the out-of-place masked_fill, cuBLAS' memset
    "attn_naive": (3, 0, "eager", ARTICLE, MaskUse("tensor"), 7, 0),
    "attn_inplace": (3, 0, "eager", ARTICLE, MaskUse("tensor"), 6, 0),
    "attn_sdpa_math": (3, 0, "math", ARTICLE, TOP_LEFT, 20, 0),
    "attn_sdpa_efficient": (3, 0, "efficient", ARTICLE, TOP_LEFT, 1, 0),
    "attn_sdpa_flash": (3, 0, "flash", ARTICLE, TOP_LEFT, 1, 0),
    # a memset and the kernel
    "attn_sdpa_cudnn": (3, 0, "cudnn", ARTICLE, TOP_LEFT, 2, 0),
    # a fill of the scheduler's counter and the kernel
    "attn_fa3": (3, 0, "flash_attention_3", ARTICLE, BOTTOM_RIGHT, 2, 0),
    "attn_fp32_sdpa_default": (
        *(3, 0, "efficient"),
        *(Sizes(4, 16, 16, 2048, 2048, 64, 64, "float32"), TOP_LEFT, 1, 0),
    ),
    # backward: copies of the gradient that sum() expands, delta, the kernel, conversions
    "attn_train_sdpa_math": (3, 3, "math", ARTICLE, TOP_LEFT, 20, 12),
    "attn_train_sdpa_efficient": (3, 3, "efficient", ARTICLE, TOP_LEFT, 1, 3),
    "attn_train_sdpa_flash": (3, 3, "flash", ARTICLE, TOP_LEFT, 1, 5),
    "attn_train_sdpa_cudnn": (3, 3, "cudnn", ARTICLE, TOP_LEFT, 2, 5),
    "attn_train_fa4": (3, 3, "flash_attention_4", ARTICLE, BOTTOM_RIGHT, 1, 4),
    "attn_train_flex": (3, 3, "flex_attention", ARTICLE, MaskUse("block"), 1, 2),
    # 3 layers x 2 steps
    "model_bert_eager_train": (6, 6, "eager", BERT, NO_MASK, 8, 9),
    "model_gpt2_eager_train": (6, 6, "eager", BERT, MaskUse("tensor"), 7, 9),
    "model_llama_sdpa_train": (6, 6, "cudnn", LLAMA, TOP_LEFT, 2, 6),
}


@lru_cache
def recording(name: str) -> Trace:
    return read_kineto(recorded(name))


@lru_cache
def calls_of(name: str) -> tuple[AttentionCall, ...]:
    return tuple(attention_calls(recording(name)))


def comparable(sizes: Sizes) -> tuple[object, ...]:
    s = sizes
    return (s.batch, s.num_heads, s.num_heads_kv, s.seqlen_q, s.seqlen_k, s.head_dim, s.dtype)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_call_is_found_and_named(name: str) -> None:
    forwards, backwards, backend, sizes, mask, events, backward_events = EXPECTED[name]
    calls = calls_of(name)
    assert Counter(call.pass_ for call in calls) == Counter(
        {"forward": forwards, "backward": backwards}
    )
    for call in calls:
        assert call.backend == backend
        assert comparable(call.sizes) == comparable(sizes)
        assert call.sizes.head_dim_v == sizes.head_dim_v
        assert call.mask == mask
        assert not call.recomputed
        assert len(call.events) == (events if call.pass_ == "forward" else backward_events)
        assert call.device_ns == sum(event.duration_ns for event in call.events)
        # compiled graphs are annotations of their own, further in
        assert call.annotations[0] == ("attn_fwd" if name.startswith("attn") else "step")


@pytest.mark.parametrize("name", EXPECTED)
def test_each_backward_has_its_own_forward(name: str) -> None:
    calls = calls_of(name)
    forwards = [call.forward for call in calls if call.pass_ == "backward"]
    assert len({id(f) for f in forwards}) == len(forwards)
    for call in calls:
        if call.pass_ == "backward":
            assert call.forward in calls
            assert call.forward is not None
            assert call.forward.start_ns < call.start_ns


@pytest.mark.parametrize("name", [*EXPECTED, "model_llama_sdpa_generate"])
def test_no_attention_kernel_is_left_over_and_none_counts_twice(name: str) -> None:
    trace = recording(name)
    owned = [id(event) for call in calls_of(name) for event in call.events]
    assert len(set(owned)) == len(owned)
    kernels = [k for k in trace.kernels if decode(k.name).is_attention]
    # the models' only softmax is the attention's
    kernels += [k for k in trace.kernels if decode(k.name).role == "softmax"]
    assert kernels
    assert {id(k) for k in kernels} <= set(owned)


@pytest.mark.parametrize("name", [n for n in EXPECTED if "train" not in n])
def test_a_recording_of_attention_alone_is_attention_alone(name: str) -> None:
    total = sum(event.duration_ns for event in recording(name).device_events())
    assert sum(call.device_ns or 0 for call in calls_of(name)) == total


def test_generating_eight_tokens_twice_over_three_layers() -> None:
    calls = calls_of("model_llama_sdpa_generate")
    assert len(calls) == 2 * 8 * 3
    # the prompt of 64, then one query against a cache that grows by one
    assert Counter((c.sizes.seqlen_q, c.sizes.seqlen_k) for c in calls) == Counter(
        {(64, 64): 6, **{(1, length): 6 for length in range(65, 72)}}
    )
    assert {c.backend for c in calls} == {"cudnn"}
    assert {c.pass_ for c in calls} == {"forward"}
    assert sum(c.is_decoding for c in calls) == 42
    for call in calls:
        assert call.mask == (NO_MASK if call.is_decoding else TOP_LEFT)
        assert (call.sizes.batch, call.sizes.num_heads, call.sizes.num_heads_kv) == (1, 8, 2)


def test_parts_of_the_eager_attentions() -> None:
    labels = {
        name: next([p.label for p in c.parts] for c in calls_of(name) if c.pass_ == "forward")
        for name in EXPECTED
    }
    # "helper" is cuBLAS' memset, the second "mask" the copy that masked_fill makes
    assert labels["attn_naive"] == [
        *("helper", "scores", "scale", "mask", "mask", "softmax", "values")
    ]
    assert labels["attn_inplace"] == [*("helper", "scores", "scale", "mask", "softmax", "values")]
    assert labels["model_bert_eager_train"] == [
        *("copy", "copy", "scores", "scale", "softmax", "dropout", "copy", "values")
    ]
    assert labels["model_gpt2_eager_train"] == [
        *("copy", "scores", "scale", "mask", "softmax", "dropout", "values")
    ]
    assert labels["attn_sdpa_math"].count("scores") == 1
    assert labels["attn_sdpa_math"].count("values") == 1
    backward = next(c for c in calls_of("model_bert_eager_train") if c.pass_ == "backward")
    assert Counter(p.label for p in backward.parts) == Counter(
        {"values": 2, "scores": 2, "softmax": 2, "dropout": 1, "scale": 1, "copy": 1}
    )


def test_dropout_is_known_where_recorded() -> None:
    assert {c.dropout for c in calls_of("model_bert_eager_train")} == {True}
    assert {c.dropout for c in calls_of("attn_naive")} == {False}
    assert {c.dropout for c in calls_of("attn_train_sdpa_flash")} == {False}
    assert {c.dropout for c in calls_of("attn_fa3")} == {None}


def test_problem_and_words_of_a_call() -> None:
    call = calls_of("model_llama_sdpa_train")[0]
    problem = call.problem()
    assert problem is not None
    assert problem.group_size == 4
    assert problem.mask == Mask(None, 0, "top-left")
    assert call.describe() == (
        "cudnn forward: batch 2, heads 8/2, seqlen 512, head_dim 64, bfloat16, causal"
    )
    assert AttentionCall("x", "forward", Sizes(), MaskUse(), ()).problem() is None
    assert AttentionCall("x", "forward", Sizes(), MaskUse(), ()).device_ns is None
    flattened = Sizes(None, None, None, 5, 5, 8, 8, "float32", batch_times_heads=6)
    problem = AttentionCall("eager", "forward", flattened, NO_MASK, ()).problem()
    assert problem is not None
    assert (problem.batch, problem.num_heads) == (1, 6)


# --- recordings without operators: Nsight Systems, CUDA graphs ---

FLASH2 = (
    "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false, "
    "cutlass::half_t>, true, false>(Flash_fwd_params)"
)
COMBINE = (
    "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, "
    "false, cutlass::half_t>, 4, 3, true>(flash::Flash_fwd_params)"
)
DOT = "void flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128, 128, 8>>(P)"
BACKWARD = (
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128,"
    " 8>, false, false>(P)"
)
CONVERT = "void flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>>(P)"
GEMM = "nvjet_sm90_tst_64x64_64x13_2x1_v_bz_NNT"
MULTIPLY = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::AUnaryFunctor<c10::BFloat16, "
    "c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> > >"
)
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9>"
SOFTMAX_BACKWARD = "void (anonymous namespace)::softmax_warp_backward<c10::BFloat16, float, 9>"
TOPK = "void at::native::sbtopk::gatherTopK<float, unsigned int, 1, false>"


def kernels(*names: str, op: HostOp | None = None, stream: int = 7) -> Trace:
    """A recording of kernels alone, 10 ns each."""
    trace = Trace("made", "nsight-systems")
    for i, name in enumerate(names):
        trace.kernels.append(Kernel(name, 100 * i, 10, 0, stream, LaunchConfiguration(), op=op))
    return trace


def found(trace: Trace) -> list[tuple[str, str, list[str]]]:
    return [(c.backend, c.pass_, [p.label for p in c.parts]) for c in attention_calls(trace)]


def test_fused_kernels_and_their_helpers_make_one_call() -> None:
    trace = kernels(FLASH2, COMBINE, GEMM, FLASH2, COMBINE, DOT, BACKWARD, CONVERT, GEMM)
    assert found(trace) == [
        ("flash_attention_2", "forward", ["attention", "helper"]),
        ("flash_attention_2", "forward", ["attention", "helper"]),
        ("flash_attention_2", "backward", ["helper", "attention", "helper"]),
    ]
    call = attention_calls(trace)[0]
    assert call.sizes == Sizes(dtype="float16")
    assert call.mask.causal is True
    assert call.op is None
    assert call.host_ns is None
    assert call.device_ns == 20


@pytest.mark.parametrize("kind", ["annotation", "python"])
def test_a_range_or_a_frame_around_kernels_is_not_their_operator(kind: HostKind) -> None:
    step = HostOp("ProfilerStep#2", "annotation", 0, 9_000, 1)
    name = "attend" if kind == "annotation" else "nn.Module: Attention_0"
    around = HostOp(name, kind, 10, 5_000, 1, parent=step)
    (call,) = attention_calls(kernels(FLASH2, COMBINE, op=around))
    assert call.op is None
    assert call.host_ns is None
    assert call.host_start_ns is None
    assert call.annotations == ("ProfilerStep#2", "attend")[: 2 if kind == "annotation" else 1]
    assert call.module_path == (() if kind == "annotation" else ("Attention_0",))
    operator = HostOp("my::attention", "operator", 20, 70, 1, parent=around)
    (call,) = attention_calls(kernels(FLASH2, COMBINE, op=operator))
    assert call.op is operator
    assert call.host_ns == 70


def test_a_range_inside_a_backward_node_still_tells_a_recomputed_forward() -> None:
    node = HostOp("CheckpointBackward", "operator", 0, 900, 1, sequence=1, forward_thread=1)
    around = HostOp("attend", "annotation", 10, 500, 1, parent=node)
    (call,) = attention_calls(kernels(FLASH2, op=around))
    assert call.recomputed
    assert call.op is None


def test_two_kernels_of_one_backward_and_two_streams() -> None:
    assert found(kernels("_attn_bwd_preprocess", "_attn_bwd_dkdv", "_attn_bwd_dq")) == [
        ("triton", "backward", ["helper", "attention", "attention"])
    ]
    trace = kernels("_attn_bwd_dkdv", "_attn_bwd_dq", "_attn_bwd_dkdv", "_attn_bwd_dq")
    assert found(trace) == [("triton", "backward", ["attention", "attention"])] * 2
    both = kernels(FLASH2, FLASH2)
    both.kernels[1].stream = 8
    assert len(attention_calls(both)) == 2


def test_parts_are_recognised_from_the_order_of_kernels() -> None:
    forward = (GEMM, MULTIPLY, SOFTMAX, GEMM)
    backward = (GEMM, GEMM, SOFTMAX_BACKWARD, MULTIPLY, GEMM, GEMM)
    assert found(kernels(GEMM, *forward, MULTIPLY, *backward)) == [
        ("eager", "forward", ["scores", "other", "softmax", "values"]),
        (
            "eager",
            "backward",
            ["values", "values", "softmax", "other", "scores", "scores"],
        ),
    ]


@pytest.mark.parametrize(
    "names",
    [
        (GEMM, SOFTMAX, TOPK, GEMM),  # a router
        (GEMM, SOFTMAX),
        (SOFTMAX, GEMM),
        (GEMM, SOFTMAX, *[MULTIPLY] * 9, GEMM),
        (GEMM, SOFTMAX_BACKWARD, GEMM),
        (),
    ],
)
def test_other_softmaxes_are_no_attention(names: tuple[str, ...]) -> None:
    assert attention_calls(kernels(*names)) == []


def test_a_linear_layer_before_a_softmax_is_no_attention() -> None:
    trace = kernels(GEMM, SOFTMAX, GEMM, op=HostOp("aten::mm", "operator", 0, 10, 1))
    assert attention_calls(trace) == []
    batched = kernels(GEMM, SOFTMAX, GEMM, op=HostOp("aten::bmm", "operator", 0, 10, 1))
    assert len(attention_calls(batched)) == 1


def test_kernels_of_a_graph_launch_count_one_by_one() -> None:
    trace = kernels(GEMM, MULTIPLY, SOFTMAX, GEMM, FLASH2, COMBINE)
    launch = Launch("cudaGraphLaunch", 0, 5, 1, correlation=77)
    for kernel in trace.kernels:
        kernel.launch, kernel.correlation = launch, 77
    assert [c.backend for c in attention_calls(trace)] == ["eager", "flash_attention_2"]


@pytest.mark.parametrize(
    ("arguments", "mask", "words", "causal"),
    [
        (("True", "-1", "-1", "0"), BOTTOM_RIGHT, ", causal", True),
        (("False", "-1", "-1", "0"), NO_MASK, "", False),
        (
            ("True", "128", "0", "0"),
            MaskUse("causal", "bottom-right", (128, 0)),
            ", causal, window 128 to 0",
            True,
        ),
        (
            ("False", "64", "-1", "0"),
            MaskUse("window", "bottom-right", (64, None)),
            ", window 64 to all",
            False,
        ),
        (
            ("False", "64", "0", "0"),
            MaskUse("window", "bottom-right", (64, 0)),
            ", window 64 to 0",
            True,
        ),
        ((), MaskUse(), "", None),
    ],
)
def test_windows_of_flash_attention(
    arguments: tuple[str, ...], mask: MaskUse, words: str, causal: bool | None
) -> None:
    shape = (2, 256, 4, 64)
    inputs = OperatorInputs(
        shapes=(shape, shape, shape, *[()] * (1 + len(arguments))),
        dtypes=("c10::Half",) * 3 + ("Scalar",) * (1 + len(arguments)),
        values=("", "", "", "0.125", *arguments),
    )
    trace = Trace("made", "kineto")
    trace.host_ops.append(
        HostOp("flash_attn_3::_flash_attn_forward", "operator", 0, 9, 1, inputs=inputs)
    )
    (call,) = attention_calls(trace)
    assert call.mask == mask
    assert call.mask.causal is causal
    assert call.describe() == (
        "flash_attention_3 forward: batch 2, heads 4, seqlen 256, head_dim 64, float16" + words
    )
    problem = call.problem()
    assert problem is not None
    if mask.window is not None:
        assert problem.mask == Mask(*mask.window)


JUNK = st.sampled_from(
    [None, 0, -1, 1e30, "", "x", "True", [], [[]], [[1, 2], [3]], [[-5, 0, 3], [0, 0, 0]], {}]
)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_arguments_never_give_a_traceback(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["attn_naive", "attn_train_flex", "attn_train_sdpa_flash"]))
    document = json.loads(gzip.decompress(Path(recorded(name)).read_bytes()))
    operators = [e for e in document["traceEvents"] if e.get("cat") == "cpu_op"]
    for event in data.draw(st.lists(st.sampled_from(operators), max_size=20)):
        key = data.draw(st.sampled_from(sorted(event["args"])))
        event["args"][key] = data.draw(JUNK)
        event["name"] = data.draw(st.sampled_from([event["name"], "aten::softmax", "aten::bmm"]))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(document, file)
        file.flush()
        for call in attention_calls(read_kineto(file.name)):
            assert call.describe().startswith(call.backend)
            assert call.problem() is None or call.sizes.head_dim is not None


def test_memory_operations_alone_are_no_attention() -> None:
    trace = Trace("made", "kineto")
    trace.copies.append(Copy("Memset (Device)", "memset", 0, 5, 0, 7))
    assert attention_calls(trace) == []
