"""In which numbers linear layers multiply: as their tensors are, or in eight bits."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.ops.fp8 import Quantized
from megascale.parallel.weights import add_product

Operand = Tensor | Quantized
"""A factor of a product."""

Name = Literal["input", "gradient"]
"""Of a factor that has tokens: a layer's input, or its output's gradient."""


class Numerics(Protocol):
    """How the operands of a linear layer of weight [n, k] enter its products.

    `piecewise`: whether the weight's gradient may be formed for some tokens after others.
    """

    piecewise: bool

    def input(self, x: Tensor) -> Operand:
        """An input [s, b, k], on its way to be gathered or not."""

    def kept(self, x: Tensor, operand: Operand) -> Operand:
        """What of an input, and the operand that it became, is kept for the weight's gradient."""

    def gradient(self, grad: Tensor) -> Operand:
        """An output's gradient [s, b, n]."""

    def travelling(self, grad: Tensor) -> Operand:
        """An output's gradient on its way to be gathered."""

    def arrived(self, grad: Operand) -> Operand:
        """What has travelled, or rows of it."""

    def weight(self, weight: Tensor) -> Operand:
        """The weight, [n, k]."""

    def across(self, weight: Tensor) -> Operand:
        """The weight's transpose, [k, n]."""

    def linear(self, x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x [..., k] times weight [n, k] transposed, plus bias [n]: [..., n] in `dtype`, that of plain factors."""

    def multiply(
        self, out: Tensor, x: Operand, weight: Operand, bias: Tensor | None = None, *, add: bool = False
    ) -> None:
        """out [..., n] = x [..., k] times weight [n, k] transposed, plus bias, or plus what is there if `add`."""

    def along_tokens(self, name: Name, x: Operand) -> Operand:
        """The input or the output's gradient, whole or as it was kept, as it enters the weight's gradient."""

    def add_gradient(self, weight: Tensor, grad: Operand, x: Operand) -> Tensor | None:
        """Add the product over tokens of what `along_tokens` made of gradient [s, b, n] and input [s, b, k] to the
        weight's gradient. Returns it if autograd must keep it.
        """


class Plain:
    """Everything as it is."""

    piecewise = True

    def input(self, x: Tensor) -> Operand:
        return x

    def kept(self, x: Tensor, operand: Operand) -> Operand:
        return x

    def gradient(self, grad: Tensor) -> Operand:
        return grad

    def travelling(self, grad: Tensor) -> Operand:
        return grad

    def arrived(self, grad: Operand) -> Operand:
        return grad

    def weight(self, weight: Tensor) -> Operand:
        return weight

    def across(self, weight: Tensor) -> Operand:
        return weight.t()

    def linear(self, x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert isinstance(x, Tensor) and isinstance(weight, Tensor)
        return F.linear(x, weight, bias)

    def multiply(
        self, out: Tensor, x: Operand, weight: Operand, bias: Tensor | None = None, *, add: bool = False
    ) -> None:
        assert isinstance(x, Tensor) and isinstance(weight, Tensor)
        rows, result = rows_of(x), out.view(-1, out.shape[-1])
        if add:
            result.addmm_(rows, weight.t())
        elif bias is None:
            torch.mm(rows, weight.t(), out=result)
        else:
            torch.addmm(bias, rows, weight.t(), out=result)

    def along_tokens(self, name: Name, x: Operand) -> Operand:
        return x

    def add_gradient(self, weight: Tensor, grad: Operand, x: Operand) -> Tensor | None:
        assert isinstance(grad, Tensor) and isinstance(x, Tensor)
        return add_product(weight, rows_of(grad), rows_of(x))


PLAIN = Plain()


class Factor(NamedTuple):
    """A weight [n, k] as it enters a product, a bias [n], and in which numbers they multiply."""

    weight: Operand
    bias: Tensor | None = None
    numerics: Numerics = PLAIN


def rows_of(x: Tensor) -> Tensor:
    """x [..., k] as a matrix."""
    return x.reshape(-1, x.shape[-1])
