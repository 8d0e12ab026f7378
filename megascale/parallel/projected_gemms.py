"""Linear layers that save a projection of their input for wgrad, for rules that update in its subspace.

For Y = X W^T with W [n, k] and a projection P [k, r] of the rule, the same for equal inputs and on all ranks:

    forward    saved: X P [t, r], in place of X [t, k]; summed over tp where tp shards k
    wgrad      dW = (dY^T (X P)) P^T
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.config.model import ModelConfig
from megascale.config.train import OptimizerConfig
from megascale.core.registry import Card
from megascale.layout.blocks import block_spec, linears
from megascale.layout.param_groups import ParamGroups
from megascale.parallel.grad_accumulation import accumulate_wgrad
from megascale.parallel.linear_gemms import HIGH_PRECISION_GEMMS, LinearGemms, Operand, flatten_tokens
from megascale.parallel.tp_overlap import TensorParallel


class ProjectedGemms(LinearGemms):
    """The GEMMs of a layer whose saved input is X P. `project`: from a step, and a tensor like it, to P."""

    def __init__(self, inputs: int, project: Callable[[int, Tensor], Tensor], tp: TensorParallel) -> None:
        self._inputs, self._project, self._group = inputs, project, tp.group

    def saved_input(self, x: Tensor, operand: Operand) -> Operand:
        low = x @ self._projection(x)
        if x.shape[-1] < self._inputs:
            all_reduce(self._group, low, label="projected input")
        return low

    def accumulate_wgrad(self, weight: Tensor, grad: Operand, x: Operand) -> Tensor | None:
        assert isinstance(grad, Tensor) and isinstance(x, Tensor)
        low = flatten_tokens(x).t() @ flatten_tokens(grad)
        return accumulate_wgrad(weight, low, self._projection(weight).t().contiguous())

    def _projection(self, like: Tensor) -> Tensor:
        """Return the rows of P for this rank's inputs, the last dimension of a tensor, in its dtype."""
        parts = self._project(self._group.recorder.step, like).split(like.shape[-1])
        return parts[self._group.index if len(parts) > 1 else 0]


def rule_gemms(model: ModelConfig, optimizer: OptimizerConfig, tp: TensorParallel) -> Callable[[str], LinearGemms]:
    """Return the GEMMs of a linear layer by its name: projected, if the rule's card has a projection."""
    rule = ParamGroups(optimizer).default
    target, options = rule.facts["input_projection"], rule.all_options

    def build(name: str) -> LinearGemms:
        _, layer, place = name.split(".", 2)
        spec = next(spec for spec in linears(block_spec(model, int(layer))) if spec.name == place)
        project = partial(Card(rule.rule, "", target).load(), name, spec.inputs, options)
        return ProjectedGemms(spec.inputs, project, tp) if spec.alone else HIGH_PRECISION_GEMMS

    return build if target else lambda name: HIGH_PRECISION_GEMMS
