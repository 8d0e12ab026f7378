"""Transformer blocks. Attention before the MLP: `SerialBlock`, `SandwichBlock`, `PostNormBlock`. Both on the same
input: `ParallelBlock`, `ParallelTwoNormsBlock`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from megascale.model.attention import Attention
from megascale.model.mlp import MLP
from megascale.model.modules import LayerContext, Norm, add_branch, residual_dropout
from megascale.parallel.domino import in_halves
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.recompute import Recomputation
from megascale.parallel.segments import Steps, finish
from megascale.parallel.tensor import column_parallel_steps, row_parallel_steps
from megascale.record.label import Label

if TYPE_CHECKING:
    from megascale.model.experts import Experts


class SteppedBlock(nn.Module):
    """A block that computes in steps, and with Domino both halves of a micro-batch in turns."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self._tp = context.tp

    def forward(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Tensor:
        """Map x [s, b, h] to [s, b, h]. Without `compute_output` only the result's shape and gradients are valid."""
        if not self._tp.domino:
            return finish(self.steps(x_sbh, batch, compute_output))
        return in_halves(lambda x, half, leads: self.steps(x, half, compute_output), x_sbh, batch)

    def steps(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Steps[Tensor]:
        """Compute `forward` of a micro-batch, or of a half."""
        raise NotImplementedError


class SerialBlock(SteppedBlock):
    """x + attention(norm(x)), then + mlp(norm(.)): the block of GPT-2 and Llama. Norms `before` a branch, or `after`;
    dropout applies to a branch after its norms.
    """

    before: ClassVar[bool] = True
    after: ClassVar[bool] = False

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__(context)
        name = f"layers.{index}"
        if self.before:
            self.attention_norm, self.mlp_norm = (Norm(context, f"{name}.{at}_norm") for at in ("attention", "mlp"))
        if self.after:
            self.attention_post_norm = Norm(context, f"{name}.attention_post_norm")
            self.mlp_post_norm = Norm(context, f"{name}.mlp_post_norm")
        self.attention = context.model.attention_kind(index).load()(context, index)
        self.mlp = feed_forward(context, index)
        self._tau = context.model.residual_tau
        self._drop = lambda x, batch, branch: residual_dropout(x, batch, f"{name}.{branch}", context)

    def steps(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Steps[Tensor]:
        again = self.attention_norm.recompute_norm(x_sbh) if self.before else None
        branch = yield from self.attention.steps(self.attention_norm(x_sbh) if self.before else x_sbh, batch, again)
        branch = self._drop(self.attention_post_norm(branch) if self.after else branch, batch, "attention.out")
        if self.before:
            x_sbh, normed = self.mlp_norm.add_norm(x_sbh, branch)
            again = self.mlp_norm.recompute_norm(x_sbh)
        else:
            x_sbh = normed = add_branch(x_sbh, branch, self._tau)
        # the last GEMM always runs before a norm, which saves its output
        x_sbh, branch = yield from branch_steps(self.mlp, x_sbh, normed, batch, again, compute_output or self.after)
        branch = self._drop(self.mlp_post_norm(branch) if self.after else branch, batch, "mlp.down")
        return add_branch(x_sbh, branch, self._tau)


class SandwichBlock(SerialBlock):
    """x + post_norm(attention(norm(x))), then + post_norm(mlp(norm(.))): the block of Gemma 2 and 3."""

    after = True


class PostNormBlock(SerialBlock):
    """x + norm(attention(x)), then + norm(mlp(.)): the block of OLMo 2, FOG and µnit scaling."""

    before, after = False, True


class ParallelBlock(SteppedBlock):
    """x + attention(norm(x)) + mlp(norm(x)) (Wang and Komatsuzaki 2021; MegaScale 3.1).

    The branches share one all-gather of their input and one reduction of their sum, which overlap with the MLP's larger
    GEMMs. An MLP in tiles has its own. Dropout applies to the sum of the branches.
    """

    norms: ClassVar[tuple[str, ...]] = ("norm",)

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__(context)
        name = f"layers.{index}"
        norms = [Norm(context, f"{name}.{norm}") for norm in self.norms]
        self.attention_norm, self.mlp_norm = norms[0], norms[-1]
        self.attention = Attention(context, index)
        self.mlp = MLP(context, index)
        self._index = index
        self._drop = lambda x, batch: residual_dropout(x, batch, name, context)

    def steps(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Steps[Tensor]:
        attention, mlp = self.attention, self.mlp
        if mlp.tiles > 1:
            normed, again = self.attention_norm(x_sbh), self.attention_norm.recompute_norm(x_sbh)
            branch = yield from attention.steps(normed, batch, again, compute_output)
            if len(self.norms) > 1:
                normed, again = self.mlp_norm(x_sbh), self.mlp_norm.recompute_norm(x_sbh)
            branch = branch + (yield from mlp.steps(normed, batch, again, compute_output))
            return x_sbh + self._drop(branch, batch)
        heads, inner = yield from self._into_branches(x_sbh, batch)
        inputs = [heads, mlp.activate(batch, inner)]
        rows = [layer.params.of(batch) for layer in (attention.out, mlp.down)]
        recompute_inputs = [None, mlp.recompute_activation(inner, batch)]
        label = Label.for_layer(self._index, "out and down")
        branch = yield from row_parallel_steps(inputs, rows, self._tp, label, recompute_inputs, compute_output)
        return x_sbh + self._drop(branch, batch)

    def _into_branches(self, x_sbh: Tensor, batch: MicroBatch) -> Steps[tuple[Tensor, Tensor]]:
        """Compute attention of all heads of this rank, and the MLP up to its activation."""
        columns = [layer.params.of(batch) for layer in (self.attention.qkv, self.mlp.up)]
        label = Label.for_layer(self._index, "qkv and up")
        again = self.attention_norm.recompute_norm(x_sbh)
        qkv, inner = yield from column_parallel_steps(self.attention_norm(x_sbh), columns, self._tp, label, again)
        return self.attention.core_attention(qkv, batch), inner


class ParallelTwoNormsBlock(ParallelBlock):
    """x + attention(attention_norm(x)) + mlp(mlp_norm(x)): the block of GPT-NeoX. The branches share no all-gather."""

    norms: ClassVar[tuple[str, ...]] = ("attention_norm", "mlp_norm")

    def _into_branches(self, x_sbh: Tensor, batch: MicroBatch) -> Steps[tuple[Tensor, Tensor]]:
        again = self.attention_norm.recompute_norm(x_sbh)
        (qkv,) = yield from self.attention.project(self.attention_norm(x_sbh), batch, again)
        heads = self.attention.core_attention(qkv, batch)
        (inner,) = yield from self.mlp.project(self.mlp_norm(x_sbh), batch, self.mlp_norm.recompute_norm(x_sbh))
        return heads, inner


def feed_forward(context: LayerContext, index: int) -> MLP | Experts:
    """Build the branch of layer `index` beside attention: an MLP, or experts."""
    if not context.model.has_experts(index):
        return MLP(context, index)
    from megascale.model.experts import Experts

    return Experts(context, index)


def branch_steps(
    branch: MLP | Experts, residual: Tensor, x_sbh: Tensor, batch: MicroBatch,
    recompute_input: Recomputation | None = None, compute_output: bool = True,
) -> Steps[tuple[Tensor, Tensor]]:  # fmt: skip
    """Run the branch on x; return the `residual` stream, which the segments of experts pass on, and the result. Other
    arguments as in `MLP.steps`; experts save x for the router, and compute their result in any case.
    """
    if isinstance(branch, MLP):
        return residual, (yield from branch.steps(x_sbh, batch, recompute_input, compute_output))
    return (yield from branch.steps(residual, x_sbh, batch))
