"""Transformer blocks. Attention before the MLP: `SerialBlock`, `SandwichBlock`, `PostNormBlock`. Both on the same
input: `ParallelBlock`, `ParallelTwoNormsBlock`.
"""

from __future__ import annotations

from torch import Tensor, nn

from megascale.model.attention import Attention, self_attention
from megascale.model.mlp import MLP, branch_segments, feed_forward
from megascale.model.modules import LayerContext, Norm, residual_dropout
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.segments import Segments, run_whole
from megascale.parallel.tensor import column_parallel_linears, row_parallel_linears
from megascale.record.label import Label


class SequentialBlock(nn.Module):
    """A block whose MLP, or experts, follow its attention."""

    def segments(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Segments[Tensor]:
        """As `forward`, in segments."""
        raise NotImplementedError

    def forward(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Tensor:
        """Map x [s, b, h] to [s, b, h]. Without `compute_output` only the result's shape and gradients are valid."""
        return run_whole(self.segments(x_sbh, batch, compute_output))


class SerialBlock(SequentialBlock):
    """x + attention(norm(x)), then + mlp(norm(.)): the block of GPT-2 and Llama."""

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.attention_norm = Norm(context, f"{name}.attention_norm")
        self.attention = self_attention(context, index)
        self.mlp_norm = Norm(context, f"{name}.mlp_norm")
        self.mlp = feed_forward(context, index)
        self._drop = lambda x, batch, branch: residual_dropout(x, batch, f"{name}.{branch}", context)

    def segments(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Segments[Tensor]:
        branch = self.attention(self.attention_norm(x_sbh), batch, self.attention_norm.recompute_norm(x_sbh))
        x_sbh, normed = self.mlp_norm.add_norm(x_sbh, self._drop(branch, batch, "attention.out"))
        recompute_norm = self.mlp_norm.recompute_norm(x_sbh)
        x_sbh, branch = yield from branch_segments(self.mlp, x_sbh, normed, batch, recompute_norm, compute_output)
        return x_sbh + self._drop(branch, batch, "mlp.down")


class SandwichBlock(SequentialBlock):
    """x + post_norm(attention(norm(x))), then + post_norm(mlp(norm(.))): the block of Gemma 2 and 3.

    Dropout applies to a branch after its second norm.
    """

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.attention_norm = Norm(context, f"{name}.attention_norm")
        self.attention = Attention(context, index)
        self.attention_post_norm = Norm(context, f"{name}.attention_post_norm")
        self.mlp_norm = Norm(context, f"{name}.mlp_norm")
        self.mlp = feed_forward(context, index)
        self.mlp_post_norm = Norm(context, f"{name}.mlp_post_norm")
        self._drop = lambda x, batch, branch: residual_dropout(x, batch, f"{name}.{branch}", context)

    def segments(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Segments[Tensor]:
        """As `forward`. The last GEMM always runs: the norm after it saves its output."""
        branch = self.attention(self.attention_norm(x_sbh), batch, self.attention_norm.recompute_norm(x_sbh))
        branch = self._drop(self.attention_post_norm(branch), batch, "attention.out")
        x_sbh, normed = self.mlp_norm.add_norm(x_sbh, branch)
        recompute_norm = self.mlp_norm.recompute_norm(x_sbh)
        x_sbh, branch = yield from branch_segments(self.mlp, x_sbh, normed, batch, recompute_norm)
        return x_sbh + self._drop(self.mlp_post_norm(branch), batch, "mlp.down")


class PostNormBlock(SequentialBlock):
    """x + norm(attention(x)), then + norm(mlp(.)): the block of OLMo 2. Dropout applies to a branch after its norm."""

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.attention = Attention(context, index)
        self.attention_post_norm = Norm(context, f"{name}.attention_post_norm")
        self.mlp = feed_forward(context, index)
        self.mlp_post_norm = Norm(context, f"{name}.mlp_post_norm")
        self._drop = lambda x, batch, branch: residual_dropout(x, batch, f"{name}.{branch}", context)

    def segments(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Segments[Tensor]:
        """As `forward`. The last GEMM always runs: the norm after it saves its output."""
        branch = self.attention_post_norm(self.attention(x_sbh, batch))
        x_sbh = x_sbh + self._drop(branch, batch, "attention.out")
        x_sbh, branch = yield from branch_segments(self.mlp, x_sbh, x_sbh, batch)
        return x_sbh + self._drop(self.mlp_post_norm(branch), batch, "mlp.down")


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)) (Wang and Komatsuzaki 2021; MegaScale 3.1).

    The branches share one all-gather of their input and one reduction of their sum, which overlap with the MLP's larger
    GEMMs. An MLP in tiles has its own. Dropout applies to the sum of the branches.
    """

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.norm = Norm(context, f"{name}.norm")
        self.attention = Attention(context, index)
        self.mlp = MLP(context, index)
        self._tp = context.tp
        self._index = index
        self._drop = lambda x, batch: residual_dropout(x, batch, name, context)

    def forward(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Tensor:
        """Map x [s, b, h] to [s, b, h]. Without `compute_output` only the result's shape and gradients are valid."""
        recompute_norm = self.norm.recompute_norm(x_sbh)
        if self.mlp.tiles > 1:
            normed = self.norm(x_sbh)
            branch = self.attention(normed, batch, recompute_norm, compute_output)
            return x_sbh + self._drop(branch + self.mlp(normed, batch, recompute_norm, compute_output), batch)
        columns, label = [self.attention.qkv.params, self.mlp.up.params], Label.for_layer(self._index, "qkv and up")
        qkv, inner = column_parallel_linears(self.norm(x_sbh), columns, self._tp, label, recompute_norm)
        heads = self.attention.core_attention(qkv, batch)
        return x_sbh + self._drop(_sum_branches(self, heads, inner, compute_output), batch)


class ParallelTwoNormsBlock(nn.Module):
    """x + attention(attention_norm(x)) + mlp(mlp_norm(x)): the block of GPT-NeoX.

    The branches share one reduction of their sum, but not the all-gather of their inputs; an MLP in tiles has its own
    reduction. Dropout applies to the sum.
    """

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.attention_norm = Norm(context, f"{name}.attention_norm")
        self.attention = Attention(context, index)
        self.mlp_norm = Norm(context, f"{name}.mlp_norm")
        self.mlp = MLP(context, index)
        self._tp = context.tp
        self._index = index
        self._drop = lambda x, batch: residual_dropout(x, batch, name, context)

    def forward(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Tensor:
        """Map x [s, b, h] to [s, b, h]. Without `compute_output` only the result's shape and gradients are valid."""
        normed, recompute_norm = self.attention_norm(x_sbh), self.attention_norm.recompute_norm(x_sbh)
        if self.mlp.tiles > 1:
            branch = self.attention(normed, batch, recompute_norm, compute_output)
            mlp = self.mlp(self.mlp_norm(x_sbh), batch, self.mlp_norm.recompute_norm(x_sbh), compute_output)
            return x_sbh + self._drop(branch + mlp, batch)
        qkv = self.attention.project(normed, recompute_norm)
        heads = self.attention.core_attention(qkv, batch)
        inner = self.mlp.project(self.mlp_norm(x_sbh), self.mlp_norm.recompute_norm(x_sbh))
        return x_sbh + self._drop(_sum_branches(self, heads, inner, compute_output), batch)


def _sum_branches(
    block: ParallelBlock | ParallelTwoNormsBlock, heads: Tensor, inner: Tensor, compute_output: bool
) -> Tensor:
    """The sum of both branches, by one reduction: of `heads`, the attention of all heads of this rank, and `inner`, the
    MLP before its activation.
    """
    attention, mlp = block.attention, block.mlp
    inputs, rows = [heads, mlp.activate(inner)], [attention.out.params, mlp.down.params]
    recompute_inputs, label = [None, mlp.recompute_activation(inner)], Label.for_layer(block._index, "out and down")
    return row_parallel_linears(inputs, rows, block._tp, label, recompute_inputs, compute_output)
