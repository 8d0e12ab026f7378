"""GEMM precision of linear layers: the parameters' own dtype (`NativePrecision`), or FP8 (`parallel.fp8_linear`).

For one layer, Y = X W^T + b with X [s, b, k] and W [n, k], tokens flattened in wgrad:

    forward  Y  = X W^T     input_operand(X), weight_for_forward(W)                     gemm, gemm_out
    dgrad    dX = dY W      grad_operand(dY), weight_for_dgrad(W)                       gemm, gemm_out
    wgrad    dW = dY^T X    operand_for_wgrad of dY and of saved_for_wgrad(X)           accumulate_wgrad
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.ops.fp8 import Quantized
from megascale.parallel.grad_accumulation import accumulate_wgrad

Operand = Tensor | Quantized
"""An operand of a GEMM."""

OperandName = Literal["input", "gradient"]
"""The operands with a token dimension: the input X, and the output gradient dY."""


class GemmPrecision(Protocol):
    """Conversion of a linear layer's operands for the three GEMMs, and the GEMMs.

    `chunked_wgrad`: wgrad may be computed for a part of the tokens at a time.
    """

    chunked_wgrad: bool

    def input_operand(self, x: Tensor) -> Operand:
        """Convert an input [s, b, k] for the forward GEMM, before any all-gather."""

    def saved_for_wgrad(self, x: Tensor, operand: Operand) -> Operand:
        """Return the tensor to save for wgrad: x or its operand (or an output gradient and its operand)."""

    def grad_operand(self, grad: Tensor) -> Operand:
        """Convert an output gradient [s, b, n] for dgrad."""

    def before_all_gather(self, grad: Tensor) -> Operand:
        """Convert this rank's shard of an output gradient to the form in which it is all-gathered."""

    def after_all_gather(self, grad: Operand) -> Operand:
        """Convert all-gathered rows of an output gradient for dgrad."""

    def weight_for_forward(self, weight: Tensor) -> Operand:
        """Convert the weight, [n, k]."""

    def weight_for_dgrad(self, weight: Tensor) -> Operand:
        """Convert the transpose of the weight, [k, n]."""

    def gemm(self, x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Compute x [..., k] weight^T [k, n] + bias [n]: [..., n] in `dtype`, which unquantized operands have."""

    def gemm_out(
        self, out: Tensor, x: Operand, weight: Operand, bias: Tensor | None = None, *, add: bool = False
    ) -> None:
        """Write x weight^T + bias into out [..., n], or add x weight^T to out with `add`."""

    def operand_for_wgrad(self, name: OperandName, x: Operand) -> Operand:
        """Convert the input or output gradient for wgrad, from the tensor itself or from its saved form."""

    def accumulate_wgrad(self, weight: Tensor, grad: Operand, x: Operand) -> Tensor | None:
        """Add grad^T x, summed over tokens, to the weight's gradient; both operands come from `operand_for_wgrad`.

        Returns the gradient if the weight has no `main_grad`, for autograd to accumulate.
        """


class NativePrecision:
    """GEMMs in the dtype of the tensors, without conversion."""

    chunked_wgrad = True

    def input_operand(self, x: Tensor) -> Operand:
        return x

    def saved_for_wgrad(self, x: Tensor, operand: Operand) -> Operand:
        return x

    def grad_operand(self, grad: Tensor) -> Operand:
        return grad

    def before_all_gather(self, grad: Tensor) -> Operand:
        return grad

    def after_all_gather(self, grad: Operand) -> Operand:
        return grad

    def weight_for_forward(self, weight: Tensor) -> Operand:
        return weight

    def weight_for_dgrad(self, weight: Tensor) -> Operand:
        return weight.t()

    def gemm(self, x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert isinstance(x, Tensor) and isinstance(weight, Tensor)
        return F.linear(x, weight, bias)

    def gemm_out(
        self, out: Tensor, x: Operand, weight: Operand, bias: Tensor | None = None, *, add: bool = False
    ) -> None:
        assert isinstance(x, Tensor) and isinstance(weight, Tensor)
        rows, result = flatten_tokens(x), out.view(-1, out.shape[-1])
        if add:
            result.addmm_(rows, weight.t())
        elif bias is None:
            torch.mm(rows, weight.t(), out=result)
        else:
            torch.addmm(bias, rows, weight.t(), out=result)

    def operand_for_wgrad(self, name: OperandName, x: Operand) -> Operand:
        return x

    def accumulate_wgrad(self, weight: Tensor, grad: Operand, x: Operand) -> Tensor | None:
        assert isinstance(grad, Tensor) and isinstance(x, Tensor)
        return accumulate_wgrad(weight, flatten_tokens(grad), flatten_tokens(x))


NATIVE_PRECISION = NativePrecision()


class GemmWeight(NamedTuple):
    """A weight operand [n, k], a bias [n], and the precision of their GEMM."""

    weight: Operand
    bias: Tensor | None = None
    precision: GemmPrecision = NATIVE_PRECISION


def flatten_tokens(x: Tensor) -> Tensor:
    """Reshape x [..., k] to a matrix."""
    return x.reshape(-1, x.shape[-1])
