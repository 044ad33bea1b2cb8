"""What a whole training step is measured on: two GPTs at two lengths, and what a step must cost.

The sizes are those of the FlashAttention-2 paper's table 1 (1.3B and 2.7B parameters, 2k and 8k),
with heads of 128 in both: GPT-3's own 2.7B has 32 heads of 80, which fit no tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdig.bench.cells import Cell
from flashdig.costs.flops import megatron_training_flops

SUITE = "training-step"
UNFUSED = "unfused"
PEERS = ("sdpa_cudnn", "sdpa_flash", "fa4", UNFUSED)
DTYPE = "bfloat16"
DTYPE_BYTES = 2
# what score matrices kept for the backward may take: those of 2k fit an H200, those of 8k do not
UNFUSED_LIMIT_BYTES = 64 * 10**9


@dataclass(frozen=True)
class GPTSize:
    """A decoder of GPT-3's kind: norm before each half of a block, GELU, biases, tied embedding.

    Attributes:
        vocabulary: rows of the embedding, padded to a multiple of 128 as GPT-2's usually is.
    """

    name: str
    layers: int
    hidden: int
    num_heads: int
    vocabulary: int = 50_304

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def parameters(self) -> int:
        """Without the learned positions, which no matrix product multiplies."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + 2 * self.hidden + self.vocabulary * self.hidden


GPT_1_3B = GPTSize("1.3B", layers=24, hidden=2048, num_heads=16)
GPT_2_7B = GPTSize("2.7B", layers=32, hidden=2560, num_heads=20)


@dataclass(frozen=True)
class TrainingCell:
    """One model at one length; a step trains on `tokens` tokens in sequences of `seqlen`."""

    size: GPTSize
    seqlen: int
    tokens: int = 16_384

    @property
    def batch(self) -> int:
        return self.tokens // self.seqlen

    @property
    def title(self) -> str:
        length = f"{self.seqlen // 1024}k" if self.seqlen % 1024 == 0 else str(self.seqlen)
        return f"GPT {self.size.name} at {length}"

    @property
    def attention(self) -> Cell:
        """The attention of one layer."""
        heads, head_dim = self.size.num_heads, self.size.head_dim
        return Cell(
            batch=self.batch,
            num_heads=heads,
            num_heads_kv=heads,
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=DTYPE,
            causal=True,
            name=self.title,
        )

    def flops(self, *, halve_causal_attention: bool) -> int:
        """Model FLOP of one step by Megatron's formula, attention in full or half of it."""
        return self.batch * megatron_training_flops(
            self.size.parameters,
            self.size.layers,
            self.size.hidden,
            self.seqlen,
            halve_causal_attention=halve_causal_attention,
        )

    @property
    def kept_score_bytes(self) -> int:
        """Probabilities that unfused attention keeps for the backward, over all layers."""
        scores = self.batch * self.size.num_heads * self.seqlen**2
        return DTYPE_BYTES * self.size.layers * scores

    def predicted_peak_bytes(self, backend: str) -> int:
        """Peak memory of a step, reached where the backward of the loss begins.

        Weights and AdamW's two moments in bfloat16; for each layer and token 16 x hidden values
        (the inputs of two norms, of four products and of GELU, and q, k, v) and a float32 LSE a
        head; for each token the log-probabilities and two gradients of their size in float32.
        """
        size = self.size
        states = 3 * DTYPE_BYTES * (size.parameters + self.seqlen * size.hidden)
        of_layer = 16 * DTYPE_BYTES * size.hidden + 4 * size.num_heads
        of_loss = 3 * 4 * size.vocabulary
        scores = self.kept_score_bytes if backend == UNFUSED else 0
        return states + self.tokens * (size.layers * of_layer + of_loss) + scores


CELLS = tuple(
    TrainingCell(size, seqlen) for size in (GPT_1_3B, GPT_2_7B) for seqlen in (2048, 8192)
)
