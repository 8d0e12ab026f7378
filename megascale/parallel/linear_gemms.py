"""The GEMMs of a linear layer, in the parameters' own dtype, or FP8 (`parallel.fp8_linear`).

For Y = X W^T + b with X [s, b, k] and W [n, k], tokens flattened in wgrad:

    GEMM                    operands                                                       method
    forward  Y  = X W^T     input_operand(X), weight_for_forward(W)                        gemm, gemm_out
    dgrad    dX = dY W      grad_operand(dY), weight_for_dgrad(W)                          gemm, gemm_out
    wgrad    dW = dY^T X    operand_for_wgrad of wgrad_source(dY) and of saved_input(X)    accumulate_wgrad
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.ops.planned_cast import PlannedCast
from megascale.ops.quantized import Quantized
from megascale.parallel.grad_accumulation import accumulate_wgrad

if TYPE_CHECKING:
    from megascale.parallel.microbatch import MicroBatch

Operand = Tensor | Quantized
"""An operand of a GEMM."""

OperandName = Literal["input", "gradient"]
"""The operands with a token dimension: the input X, and the output gradient dY."""


class LinearGemms:
    """The three GEMMs of one linear layer, in the tensors' dtype (bf16, fp32, fp64). A subclass may quantize operands.

    `wgrad_in_pieces`: wgrad may be computed for a part of the tokens at a time. `grad_in_pieces`: so may the operand of
    an all-gathered dY.
    """

    wgrad_in_pieces = True
    grad_in_pieces = True

    def of(self, batch: MicroBatch) -> LinearGemms:
        """Return the GEMMs of a micro-batch, in the step that runs."""
        return self

    def input_operand(self, x: Tensor) -> Operand:
        """Convert an input [s, b, k] for the forward GEMM, before any all-gather."""
        return x

    def planned_cast(self, name: OperandName) -> PlannedCast | None:
        """Describe the cast of an operand for the kernel that writes it; None if a cast of its own is due."""
        return None

    def wgrad_source(self, x: Tensor, operand: Operand) -> Operand:
        """Return what wgrad transposes and quantizes: x in bf16, or `operand` if one scale holds for the tensor.

        x: an input, or an output gradient. `operand`: x as quantized for forward or dgrad.
        """
        return x

    def saved_input(self, x: Tensor, operand: Operand) -> Operand:
        """Return what is saved for wgrad of an input, with `operand` as of `wgrad_source`."""
        return self.wgrad_source(x, operand)

    def grad_operand(self, grad: Tensor) -> Operand:
        """Convert an output gradient [s, b, n] for dgrad."""
        return grad

    def before_all_gather(self, grad: Tensor) -> Operand:
        """Convert this rank's shard of an output gradient to the form in which it is all-gathered."""
        return grad

    def after_all_gather(self, grad: Operand) -> Operand:
        """Convert all-gathered rows of an output gradient for dgrad."""
        return grad

    def weight_for_forward(self, weight: Tensor) -> Operand:
        """Convert the weight, [n, k]."""
        return weight

    def weight_for_dgrad(self, weight: Tensor) -> Operand:
        """Convert the transpose of the weight, [k, n]."""
        return weight.t()

    def gemm(self, x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Compute x [..., k] weight^T [k, n] + bias [n]: [..., n] in `dtype`; unquantized operands already have it."""
        assert isinstance(x, Tensor) and isinstance(weight, Tensor)
        return F.linear(x, weight, bias)

    def gemm_out(
        self, out: Tensor, x: Operand, weight: Operand, bias: Tensor | None = None, *, add: bool = False
    ) -> None:
        """Write x weight^T + bias into out [..., n], or add x weight^T to out with `add`."""
        assert isinstance(x, Tensor) and isinstance(weight, Tensor)
        rows, result = flatten_tokens(x), out.view(-1, out.shape[-1])
        if add:
            result.addmm_(rows, weight.t())
        elif bias is None:
            torch.mm(rows, weight.t(), out=result)
        else:
            torch.addmm(bias, rows, weight.t(), out=result)

    def operand_for_wgrad(self, name: OperandName, x: Operand) -> Operand:
        """Convert an input or output gradient for wgrad; x is its `wgrad_source`."""
        return x

    def accumulate_wgrad(self, weight: Tensor, grad: Operand, x: Operand) -> Tensor | None:
        """Add grad^T x, summed over tokens, to the weight's gradient; both operands come from `operand_for_wgrad`.

        Returns the gradient if the weight has no `main_grad`, for autograd to accumulate.
        """
        assert isinstance(grad, Tensor) and isinstance(x, Tensor)
        return accumulate_wgrad(weight, flatten_tokens(grad), flatten_tokens(x))


HIGH_PRECISION_GEMMS = LinearGemms()


class WeightOperand(NamedTuple):
    """A weight converted for one GEMM x operand^T + bias: W [n, k] in forward, W^T [k, n] in dgrad.

    `LinearParams` holds the parameters from which forward and dgrad make their weight operands.
    """

    operand: Operand
    bias: Tensor | None = None
    gemms: LinearGemms = HIGH_PRECISION_GEMMS


def flatten_tokens(x: Tensor) -> Tensor:
    """Reshape x [..., k] to a matrix."""
    return x.reshape(-1, x.shape[-1])
