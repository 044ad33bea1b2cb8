"""Problems that every way of computing attention must get right, as keyword arguments.

A case is (name, shapes, options): shapes are (batch, seqlen_q, seqlen_k, num_heads, num_heads_kv,
head_dim, head_dim_v); options go to the attention function, tensors among them made by `build`.
"""

import torch

CASES = {
    "plain": ((2, 33, 47, 4, 2, 16, 16), {}),
    "causal": ((1, 130, 130, 2, 2, 16, 16), {"causal": True}),
    "causal more queries": ((2, 50, 21, 4, 2, 8, 8), {"causal": True}),
    "causal more keys": ((1, 37, 211, 3, 1, 16, 16), {"causal": True}),
    "top-left": ((1, 40, 60, 2, 1, 8, 8), {"causal": "top-left"}),
    "top-left more queries": ((1, 60, 40, 2, 1, 8, 8), {"causal": "top-left"}),
    "window": ((1, 150, 150, 2, 2, 8, 8), {"causal": True, "window": (63, None)}),
    "window both sides": ((1, 140, 170, 2, 1, 8, 8), {"window": (5, 9)}),
    "window zero": ((1, 9, 9, 1, 1, 8, 8), {"causal": True, "window": (0, 0)}),
    "window hides keys": ((1, 20, 300, 1, 1, 8, 8), {"causal": True, "window": (16, -1)}),
    "head_dim_v": ((1, 30, 30, 4, 4, 24, 16), {"causal": True}),
    "odd head_dim": ((1, 30, 30, 2, 2, 63, 36), {}),
    "softcap": ((2, 130, 130, 6, 2, 16, 16), {"softcap": 15.0, "causal": True}),
    "alibi": ((2, 17, 33, 3, 3, 8, 8), {"alibi": 1, "causal": True}),
    "alibi per batch": ((2, 17, 33, 3, 1, 8, 8), {"alibi": 2}),
    "bias": ((2, 20, 30, 4, 2, 8, 8), {"bias": (2, 4, 20, 30)}),
    "bias broadcast": ((2, 140, 150, 4, 2, 8, 8), {"bias": (1, 4, 1, 150), "causal": True}),
    "bias of rows": ((2, 140, 30, 4, 2, 8, 8), {"bias": (2, 1, 140, 1)}),
    "bool bias": ((2, 20, 30, 4, 2, 8, 8), {"bool_bias": (2, 1, 20, 30)}),
    "bool bias of keys": ((2, 20, 30, 4, 2, 8, 8), {"bool_bias": (2, 1, 1, 30), "causal": True}),
    "sinks": ((2, 40, 20, 4, 2, 8, 8), {"sinks": True, "causal": True}),
    "dropout": ((2, 135, 140, 4, 2, 8, 8), {"dropout_p": 0.3}),
    "everything": (
        (2, 135, 140, 4, 2, 24, 16),
        {
            "causal": True,
            "window": (70, None),
            "softcap": 5.0,
            "alibi": 2,
            "bias": (1, 4, 135, 140),
            "sinks": True,
            "dropout_p": 0.2,
            "softmax_scale": 0.3,
        },
    ),
    "everything, small": (
        (1, 20, 37, 4, 2, 24, 16),
        {
            "causal": True,
            "window": (9, None),
            "softcap": 5.0,
            "alibi": 2,
            "bias": (1, 4, 20, 37),
            "sinks": True,
            "dropout_p": 0.2,
            "softmax_scale": 0.3,
        },
    ),
    "one key": ((1, 5, 1, 2, 2, 8, 8), {}),
    "one query": ((1, 1, 300, 8, 1, 8, 8), {"causal": True}),
}


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, grad: bool = True):
    """(q, k, v, options) of a case; tensors that can take gradients ask for them when `grad`."""
    (batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim, head_dim_v), options = CASES[
        name
    ]
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        return x.requires_grad_(grad)

    q = randn(batch, seqlen_q, num_heads, head_dim)
    k = randn(batch, seqlen_k, num_heads_kv, head_dim)
    v = randn(batch, seqlen_k, num_heads_kv, head_dim_v)
    options = dict(options)
    if rank := options.pop("alibi", None):
        shape = (num_heads,) if rank == 1 else (batch, num_heads)
        options["alibi_slopes"] = torch.rand(*shape, generator=generator)
    if shape := options.pop("bool_bias", None):
        options["bias"] = torch.rand(*shape, generator=generator) > 0.4
    elif shape := options.get("bias"):
        options["bias"] = randn(*shape)
    if options.pop("sinks", False):
        options["sinks"] = randn(num_heads)
    return q, k, v, options


def gradients(out, lse, inputs, seed: int = 1):
    """Gradients of a random linear function of out and lse to the inputs that take one."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    row_weights = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse.dtype)
    finite = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    loss = (out * weights).sum() + (finite * row_weights).sum()
    return torch.autograd.grad(loss, inputs)


def taking_gradients(q, k, v, options):
    tensors = (q, k, v, options.get("bias"), options.get("sinks"))
    return [x for x in tensors if x is not None and x.requires_grad]
