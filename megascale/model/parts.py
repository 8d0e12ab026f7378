"""What every part of the network is given, and the two parts that all others use: linear weights and norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from megascale.config.model import ModelConfig
from megascale.layout.recompute import NOTHING, Recompute
from megascale.ops.activation import Activate
from megascale.ops.attention import Attend
from megascale.ops.compiled import Fuse, fusing
from megascale.ops.cross_entropy import CrossEntropy
from megascale.ops.norm import AddNormalize, Normalize
from megascale.ops.rope import Rotate
from megascale.ops.select import Setting, build
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.numerics import PLAIN, Numerics
from megascale.parallel.overlap import Layer, TensorAxis
from megascale.parallel.recompute import Again, formed_again

Parameters = Mapping[str, nn.Parameter]
"""This rank's parameters by the name in `layout.tensors`."""


@dataclass(frozen=True)
class Operators:
    """What one device computes, by the backends that were chosen (`ops.select`). `fuse` makes one operation of several
    that stand together in a block: with train.compile by torch.compile, else it leaves them as they are.
    """

    attend: Attend
    rotate: Rotate
    normalize: Normalize
    add_normalize: AddNormalize
    activate: Activate
    cross_entropy: CrossEntropy
    fuse: Fuse

    @classmethod
    def of(cls, setting: Setting) -> Operators:
        """The best that is present and serves, or what is asked for.

        Raises: BackendError if what is asked for cannot serve, or torch.compile cannot compile
        """
        fuse = fusing(setting)  # first: nothing else can tell why blocks cannot be compiled
        attend, rotate, normalize = (build(name, setting) for name in ("attention", "rope", "norm"))
        add_normalize, activate = (build(name, setting) for name in ("add_norm", "activation"))
        return cls(attend, rotate, normalize, add_normalize, activate, build("cross_entropy", setting), fuse)


@dataclass(frozen=True)
class Given:
    """What a part of the network is made of: its model, this rank's parameters, how activations lie on the ranks of
    tp, who computes, in which numbers each linear layer multiplies, and what is computed again.
    """

    model: ModelConfig
    parameters: Parameters
    axis: TensorAxis
    operators: Operators
    numerics: Callable[[str], Numerics] = lambda layer: PLAIN
    recompute: Recompute = NOTHING


class Linear(nn.Module):
    """The weight and bias of a linear layer; `parallel.tensor` multiplies with them."""

    def __init__(self, given: Given, name: str) -> None:
        super().__init__()
        self.weight = given.parameters[f"{name}.weight"]
        self.bias = given.parameters.get(f"{name}.bias")
        self._numerics = given.numerics(name)

    @property
    def layer(self) -> Layer:
        return Layer(self.weight, self.bias, self._numerics)


class Norm(nn.Module):
    """The configured norm over the last dimension."""

    def __init__(self, given: Given, name: str) -> None:
        super().__init__()
        self.weight = given.parameters[f"{name}.weight"]
        self.bias = given.parameters.get(f"{name}.bias")
        self._eps = given.model.norm_eps
        self._normalize = given.operators.normalize
        self._add_normalize = given.operators.add_normalize
        self._recompute = given.recompute.norm

    def forward(self, x: Tensor) -> Tensor:
        return self._normalize(x, self.weight, self.bias, self._eps)

    def of_sum(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream x with a branch added, and the norm of the sum."""
        return self._add_normalize(x, branch, self.weight, self.bias, self._eps)

    def again(self, x: Tensor) -> Again | None:
        """For the layers that the norm of x goes to."""
        return formed_again(self, x, self._recompute)


def drop_branch(x_sbh: Tensor, batch: MicroBatch, place: str, given: Given) -> Tensor:
    """Dropout on a tensor of the residual stream, which sequence parallelism cuts along dimension 0."""
    first = given.axis.index * x_sbh.shape[0] if given.axis.cut else 0
    return batch.dropout.hidden(x_sbh, place, first, given.model.seq_length)
