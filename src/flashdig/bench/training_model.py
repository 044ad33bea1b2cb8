"""A GPT whose attention can be exchanged, its text and its training step.

Plain tensors and functions: weights, gradients and AdamW's moments in bfloat16, no dropout, no
recomputation, nothing compiled. The text is the source code of this package, byte by byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashdig.bench.competitors import Attention
from flashdig.bench.training_cells import DTYPE, GPTSize, TrainingCell

if TYPE_CHECKING:
    import torch

# tokens are bytes; this one, which no source holds, ends a file
END_OF_FILE = 0
SEED = 0
LEARNING_RATE = 1e-4
# of normal weights, as GPT-2's; those that write into the residual stream are smaller with depth
WEIGHT_STD = 0.02


def text_tokens() -> bytes:
    """This package's modules in the order of their names, a token a byte, each closed by
    END_OF_FILE."""
    package = Path(__file__).resolve().parents[1]
    sources = (path.read_bytes() for path in sorted(package.rglob("*.py")))
    return b"".join(source + bytes([END_OF_FILE]) for source in sources)


def parameter_shapes(size: GPTSize, seqlen: int) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by name; those of a block begin with its number."""
    hidden = size.hidden
    block: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (
        ("qkv", 3 * hidden, hidden),
        ("projection", hidden, hidden),
        ("expand", 4 * hidden, hidden),
        ("contract", hidden, 4 * hidden),
    ):
        block |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name in ("attention_norm", "mlp_norm"):
        block |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (size.vocabulary, hidden),
        "positions.weight": (seqlen, hidden),
    }
    for layer in range(size.layers):
        shapes |= {f"{layer}.{name}": shape for name, shape in block.items()}
    return {**shapes, "norm.weight": (hidden,), "norm.bias": (hidden,)}


class GPT:
    """The model.

    Attributes:
        attention: (q, k, v) -> out, all (batch, seqlen, num_heads, head_dim), causal; q, k and v
            are views of one projection, `(batch, seqlen, 3, num_heads, head_dim)`. To be set.
        parameters: by name, not initialised.
    """

    attention: Attention

    def __init__(self, size: GPTSize, seqlen: int, device: str) -> None:
        import torch

        self.size = size
        dtype = getattr(torch, DTYPE)
        self.parameters = {
            name: torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
            for name, shape in parameter_shapes(size, seqlen).items()
        }

    def initialise(self, seed: int) -> None:
        """Random weights; the same seed gives the same on the same kind of device."""
        import torch

        device = self.parameters["embedding.weight"].device
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if name.endswith("norm.weight"):
                    parameter.fill_(1)
                elif name.endswith("bias"):
                    parameter.zero_()
                else:
                    into_stream = name.endswith(("projection.weight", "contract.weight"))
                    depth = (2 * self.size.layers) ** -0.5 if into_stream else 1
                    parameter.normal_(0, WEIGHT_STD * depth, generator=generator)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, float32; tokens and targets int64 (batch, seqlen)."""
        import torch.nn.functional as F

        embedding = self.parameters["embedding.weight"]
        x = F.embedding(tokens, embedding) + self.parameters["positions.weight"]
        for layer in range(self.size.layers):
            x = x + self._attention(self._norm(x, f"{layer}.attention_norm"), layer)
            x = x + self._mlp(self._norm(x, f"{layer}.mlp_norm"), layer)
        logits = F.linear(self._norm(x, "norm"), embedding).flatten(0, 1)
        # in bfloat16 the logarithms would have three digits
        return F.cross_entropy(logits.float(), targets.flatten())

    def _attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        batch, seqlen, hidden = x.shape
        qkv = self._linear(x, f"{layer}.qkv")
        heads = (3, self.size.num_heads, self.size.head_dim)
        q, k, v = qkv.view(batch, seqlen, *heads).unbind(2)
        out = self.attention(q, k, v).reshape(batch, seqlen, hidden)
        return self._linear(out, f"{layer}.projection")

    def _mlp(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        import torch.nn.functional as F

        wide = F.gelu(self._linear(x, f"{layer}.expand"), approximate="tanh")
        return self._linear(wide, f"{layer}.contract")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        import torch.nn.functional as F

        return F.linear(x, self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        import torch.nn.functional as F

        weight, bias = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        return F.layer_norm(x, (self.size.hidden,), weight, bias)


class Training:
    """A cell's model, its optimizer and the text on one device."""

    def __init__(self, cell: TrainingCell, device: str) -> None:
        import torch

        self.cell = cell
        self.model = GPT(cell.size, cell.seqlen, device)
        self._optimizer = torch.optim.AdamW(
            list(self.model.parameters.values()), lr=LEARNING_RATE, fused=True
        )
        text = torch.frombuffer(bytearray(text_tokens()), dtype=torch.uint8)
        self._text = text.to(device).long()
        self._steps = 0

    def restart(self) -> None:
        """The first weights again, no moments, no gradients, the text from its beginning."""
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()
        self.model.initialise(SEED)
        self._steps = 0

    def step(self, attention: Attention) -> torch.Tensor:
        """Forward, backward and update with this attention; the loss, not waited for."""
        tokens, targets = self._batch(self._steps)
        self._steps += 1
        self.model.attention = attention
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss(tokens, targets)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next stretch of the text, which begins anew where it ends; targets one further."""
        cell = self.cell
        start = number * cell.tokens % (len(self._text) - cell.tokens)
        shape = (cell.batch, cell.seqlen)
        tokens = self._text[start : start + cell.tokens].view(shape)
        return tokens, self._text[start + 1 : start + 1 + cell.tokens].view(shape)
