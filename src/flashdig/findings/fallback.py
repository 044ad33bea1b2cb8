"""Attention that is not fused: torch's math fallback with its reason, and attention made of parts.

The conditions are those of PyTorch's `sdp_utils` (CUDA): what each fused backend of
scaled_dot_product_attention refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from flashdig.costs.units import seconds, with_unit
from flashdig.findings.finding import Advice, Finding, Number
from flashdig.findings.recording import Recording, place, place_of, times
from flashdig.problem import DTYPE_BYTES
from flashdig.readers.attribution import AttentionCall
from flashdig.readers.attribution_operators import tensors
from flashdig.readers.model import Kernel

HALVES = ("float16", "bfloat16")
_SDPA = "aten::scaled_dot_product_attention"
_MASK_ARGUMENT = 3
# under this much of the busy time nobody would notice
_LEAST_SHARE = 0.01


def math_fallback(recording: Recording) -> list[Finding]:
    """scaled_dot_product_attention ran as twenty kernels instead of one."""
    by_reason: dict[str, list[AttentionCall]] = {}
    for call in recording.calls:
        if call.backend != "math" or call.pass_ != "forward":
            continue
        by_reason.setdefault(fallback_reason(call), []).append(call)
    found = []
    for reason, calls in by_reason.items():
        backwards = _backwards(recording, calls)
        finding = _fallback_finding(recording, reason, calls, backwards)
        if finding is not None:
            found.append(finding)
    return found


def _fallback_finding(
    recording: Recording, reason: str, calls: list[AttentionCall], backwards: list[AttentionCall]
) -> Finding | None:
    total_ns = sum(call.device_ns or 0 for call in (*calls, *backwards))
    if (recording.share(total_ns) or 0) < _LEAST_SHARE:
        return None
    first = next((call for call in calls if call.events), None)
    if first is None:
        return None
    typical = median(call.device_ns or 0 for call in calls)
    numbers = [
        Number("kernels of a call", kernels_of(first), "count", place(first.events[0])),
        Number("device time of a call", typical, "ns", place(first.events[0])),
    ]
    gain, basis = None, "the models of torch's fused kernels at these sizes"
    guess = recording.fused(first, _able(first, reason))
    if guess is not None:
        numbers.append(Number(f"guess for {guess.generation}", guess.expected_s * 1e9, "ns"))
        saved = 0.0
        for call in (*calls, *backwards):
            fused = recording.fused(call, _able(call, reason) if call.pass_ == "forward" else ())
            if fused is not None:
                saved += (call.device_ns or 0) / 1e9 - fused.expected_s
        gain = recording.device_gain(saved, basis) if saved > 0 else None
    with_backward = f" ({_counts(backwards[0])} in its backward)" if backwards else ""
    return Finding(
        rule="math-fallback",
        device_ns=typical if guess is None else typical - guess.expected_s * 1e9,
        host_ns=median(call.host_ns or 0 for call in calls),
        calls=(*calls, *backwards),
        backend=first.backend,
        verdict="slow",
        claim=(
            f"scaled_dot_product_attention fell back to its math backend: {_counts(first)}"
            f"{with_backward} that pass the score matrix through memory in float32, "
            f"{seconds(typical / 1e9)} a call. {reason}"
        ),
        where=f"{times(len(calls), 'call')} of {first.describe()}",
        numbers=tuple(numbers),
        gain=gain,
        advice=_advice(reason),
        confidence="likely",
    )


_SWITCHED_OFF = (
    "Nothing in the recorded inputs keeps the fused backends away, so they were switched off "
    "(sdpa_kernel or torch.backends.cuda.enable_*_sdp)."
)
_MASK_STRIDE = "The mask's last dimension has stride"
_DTYPE = "No fused backend takes"
_SHAPES = "Sizes are not recorded, so the reason cannot be told (record_shapes=True)."


def fallback_reason(call: AttentionCall) -> str:
    """Why no fused backend served a call of scaled_dot_product_attention, in a sentence."""
    op, sizes = call.op, call.sizes
    if op is None or op.inputs is None or sizes.seqlen_q is None or sizes.head_dim is None:
        return _SHAPES
    if sizes.dtype not in (*HALVES, "float32"):
        return f"{_DTYPE} {sizes.dtype}."
    shapes = tensors(op)
    if any(shape is not None and len(shape) != 4 for shape in shapes[:3]):
        return "The fused backends take four dimensions (batch, heads, seqlen, head_dim) only."
    if 0 in (sizes.seqlen_q, sizes.seqlen_k):
        return "The fused backends refuse a length of 0."
    strides = op.inputs.strides
    for at, name in enumerate(("query", "key", "value")):
        if at < len(strides) and strides[at] and strides[at][-1] != 1 and sizes.head_dim > 1:
            return (
                f"The {name}'s last dimension has stride {strides[at][-1]}; every fused backend "
                "needs 1."
            )
    if op.name == _SDPA and len(strides) > _MASK_ARGUMENT:
        mask = strides[_MASK_ARGUMENT]
        if mask and mask[-1] != 1:
            return f"{_MASK_STRIDE} {mask[-1]}; every fused backend on the GPU needs 1."
    refused = refusals(call)
    if len(refused) == 3:
        return (
            "Every fused backend refuses: "
            + "; ".join(f"{name}, {why}" for name, why in refused.items())
            + "."
        )
    return _SWITCHED_OFF


def refusals(call: AttentionCall) -> Mapping[str, str]:
    """Backend -> why it does not take the call; only what the recorded inputs show."""
    sizes, masked = call.sizes, call.mask.kind == "tensor"
    dim = sizes.head_dim or 0
    dim_v = dim if sizes.head_dim_v is None else sizes.head_dim_v
    found: dict[str, str] = {}
    if sizes.dtype not in HALVES:
        found["flash"] = f"not for {sizes.dtype}"
        found["cudnn"] = f"not for {sizes.dtype}"
    if masked:
        found.setdefault("flash", "takes no mask tensor")
    if dim > 256:
        found.setdefault("flash", f"head_dim {dim} is above 256")
    if dim != dim_v:
        found.setdefault("flash", f"head_dim_v {dim_v} is not head_dim {dim}")
    if call.mask.causal and sizes.seqlen_q != sizes.seqlen_k:
        found.setdefault("flash", "is_causal with two lengths")
    if dim > 256 or dim_v > 256:
        found.setdefault("cudnn", f"head_dim {max(dim, dim_v)} is above its limit")
    if dim % 8 or dim_v % 8:
        found.setdefault("cudnn", f"head_dim {dim} is no multiple of 8")
    element = DTYPE_BYTES.get(sizes.dtype or "", 2)
    if (dim * element) % 16:
        found["efficient"] = f"rows of {dim * element} bytes are not aligned to 16"
    return found


def _able(call: AttentionCall, reason: str) -> tuple[str, ...]:
    """Schedules of the backends that would serve the call once the reason is gone."""
    refused = refusals(call)
    if call.mask.kind == "tensor" or reason.startswith(_MASK_STRIDE):
        refused = {**refused, "flash": "takes no mask tensor"}
    names = [name for name in ("cudnn", "flash", "efficient") if name not in refused]
    return tuple(f"sdpa_{name}" for name in names) or ("sdpa_efficient",)


def _advice(reason: str) -> Advice:
    if reason.startswith(_MASK_STRIDE):
        return Advice(
            "Give the mask a last dimension of stride 1 before the layers use it.",
            "out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.contiguous())",
            ("F", "q", "k", "v", "mask"),
        )
    if reason.startswith(_DTYPE):
        return Advice(
            "Attend in bfloat16, or in float32 where more digits are needed.",
            "out = F.scaled_dot_product_attention(*(x.to(torch.bfloat16) for x in (q, k, v)))",
            ("F", "torch", "q", "k", "v"),
        )
    return Advice(
        "Leave the choice to torch or name fused backends; a refusal then says its reason.",
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        "fused = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,\n"
        "         SDPBackend.EFFICIENT_ATTENTION]\n"
        "with sdpa_kernel(fused):\n"
        "    out = F.scaled_dot_product_attention(q, k, v)",
        ("F", "q", "k", "v"),
    )


def unfused_attention(recording: Recording) -> list[Finding]:
    """Attention written as product, mask, softmax, product, its scores passing through memory."""
    eager = [call for call in recording.calls if call.backend == "eager"]
    total_ns = sum(call.device_ns or 0 for call in eager)
    if not eager or (recording.share(total_ns) or 0) < _LEAST_SHARE:
        return []
    saved_s, guessed = 0.0, 0
    for call in eager:
        fused = recording.fused(call)
        if fused is not None:
            saved_s += (call.device_ns or 0) / 1e9 - fused.expected_s
            guessed += 1
    longest = max(eager, key=lambda call: call.device_ns or 0)
    guess = recording.fused(longest)
    if guessed < len(eager) or guess is None or saved_s <= 0.1 * total_ns / 1e9:
        return []
    scores = _score_bytes(longest)
    numbers = [
        Number("kernels of a call", kernels_of(longest), "count", place(longest.events[0])),
        Number("device time of it", longest.device_ns or 0, "ns", place(longest.events[0])),
        Number(f"guess for {guess.generation}", guess.expected_s * 1e9, "ns"),
    ]
    written = ""
    if scores is not None:
        numbers.append(Number("bytes of one score matrix", scores, "bytes"))
        written = f" of {with_unit(scores, 'B')}"
    return [
        Finding(
            rule="unfused-attention",
            calls=tuple(eager),
            backend=longest.backend,
            verdict="slow",
            claim=(
                f"Attention is made of {_counts(longest)}; the score matrix{written} passes "
                f"through memory between them: {seconds((longest.device_ns or 0) / 1e9)} "
                f"{longest.pass_}, where one fused kernel takes about {seconds(guess.expected_s)}."
            ),
            where=f"{times(len(eager), 'call')}, forward and backward; the longest: "
            f"{longest.describe()}",
            numbers=tuple(numbers),
            gain=recording.device_gain(
                saved_s,
                "the models of torch's fused kernels at these sizes, without credit for what a "
                "mask tensor hides",
            ),
            advice=_fuse(eager, bool(longest.dropout)),
        )
    ]


def _fuse(eager: Sequence[AttentionCall], dropout: bool) -> Advice:
    """A fused call of the same attention: torch's has no softcap."""
    if any(part.label == "softcap" for call in eager for part in call.parts):
        return Advice(
            "Its scores are capped, which scaled_dot_product_attention cannot do: take a kernel "
            "with softcap, unless the probabilities themselves are needed.",
            "import flashdig\n"
            "rows = [x.transpose(1, 2) for x in (q, k, v)]\n"
            "out = flashdig.attention(*rows, causal=True, softcap=50.0)",
            ("q", "k", "v"),
        )
    used = ", dropout_p=0.1" if dropout else ""
    return Advice(
        "Call scaled_dot_product_attention (in transformers: attn_implementation='sdpa'), unless "
        "the probabilities themselves are needed.",
        f"out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible{used})",
        ("F", "q", "k", "v", "visible"),
    )


def slower_backend(recording: Recording) -> list[Finding]:
    """An older backend of torch ran where nothing recorded excludes a faster one."""
    found = []
    if recording.device is None or float(recording.device.architecture) < 9.0:
        return []
    for group in recording.groups:
        call, typical = group.first, group.median_device_ns
        if call.backend not in ("flash", "efficient") or call.pass_ != "forward" or not typical:
            continue
        if call.op is None or call.op.name != _SDPA or call.dropout or call.is_decoding:
            continue
        if call.mask.kind not in ("none", "causal"):
            continue  # what a mask tensor costs cuDNN is not in the models
        if "cudnn" in refusals(call) or (recording.share(group.device_ns or 0) or 0) < 0.05:
            continue
        guess = recording.expected(call.problem(), "sdpa_cudnn")
        if guess is None or typical < 1.3e9 * guess.expected_s:
            continue
        saved = typical / 1e9 - guess.expected_s
        found.append(
            Finding(
                rule="slower-backend",
                backend=call.backend,
                verdict="slow",
                device_ns=saved * 1e9,
                calls=(*group.calls, *_backwards(recording, group.calls)),
                claim=(
                    f"The {call.backend} backend ran, built on mma.sync, the older product of this "
                    f"chip: {seconds(typical / 1e9)} a call. Nothing recorded excludes cuDNN, "
                    f"which has wgmma, for which the model gives {seconds(guess.expected_s)}; so "
                    "the backend was pinned or cuDNN switched off."
                ),
                where=f"{times(group.count, 'call')} of {group.describe()}",
                numbers=(
                    Number("device time of a call", typical, "ns", place_of(group.calls)),
                    Number("guess for sdpa_cudnn", guess.expected_s * 1e9, "ns"),
                ),
                gain=recording.device_gain(saved * group.count, "the model of sdpa_cudnn"),
                advice=Advice(
                    "Let torch choose, or take a kernel made for the chip.",
                    "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
                    "with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):\n"
                    "    out = F.scaled_dot_product_attention(q, k, v)",
                    ("F", "q", "k", "v"),
                ),
                confidence="likely",
            )
        )
    return found


def _backwards(recording: Recording, calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    """The backward calls of forward ones."""
    forwards = {id(call) for call in calls}
    return [call for call in recording.calls if id(call.forward) in forwards]


def kernels_of(call: AttentionCall) -> int:
    return sum(isinstance(event, Kernel) for event in call.events)


def _counts(call: AttentionCall) -> str:
    """'5 kernels and 2 copies or fills'."""
    kernels = kernels_of(call)
    others = len(call.events) - kernels
    if others == 1:
        return f"{times(kernels, 'kernel')} and a copy or fill"
    return times(kernels, "kernel") + (f" and {others} copies or fills" if others else "")


def _score_bytes(call: AttentionCall) -> int | None:
    problem = call.problem()
    if problem is None:
        return None
    pairs = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    return pairs * problem.element_bytes
