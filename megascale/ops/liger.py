"""Liger's Triton kernels (Hsu et al. 2024) for norms and SwiGLU.

Liger's rotary embedding is not used: it needs queries and keys in separate tensors, and would cost a copy of QKV.
"""

from __future__ import annotations

from torch import Tensor

from megascale.catalog.layers import NORMS
from megascale.ops.activation import Activate
from megascale.ops.library import LIGER
from megascale.ops.norm import AddNormalize, Normalize, other_norm_requested
from megascale.ops.select import OpContext


class LigerNorm:
    """LigerRMSNormFunction and LigerLayerNormFunction."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return LIGER.unsupported_reason(context)

    def build(self, context: OpContext) -> Normalize:
        from liger_kernel.ops import LigerLayerNormFunction, LigerRMSNormFunction

        offset = NORMS[context.model.norm].facts["offset"]

        def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            # "gemma": apply the gain before rounding. Not in place, which would overwrite autograd's gradient
            return LigerRMSNormFunction.apply(x.contiguous(), weight, eps, offset, "gemma", False)

        def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            return LigerLayerNormFunction.apply(x, weight, bias, eps)

        return layer_norm if context.model.norm == "layernorm" else rms_norm


class LigerAddNorm:
    """LigerFusedAddRMSNormFunction."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return LIGER.unsupported_reason(context) or other_norm_requested(context, "liger")

    def build(self, context: OpContext) -> AddNormalize:
        from liger_kernel.ops import LigerFusedAddRMSNormFunction

        offset = NORMS[context.model.norm].facts["offset"]

        def add_rms_norm(
            x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float
        ) -> tuple[Tensor, Tensor]:
            normed, total = LigerFusedAddRMSNormFunction.apply(branch, x, weight, eps, offset, "gemma", False)
            return total, normed

        return add_rms_norm


class LigerActivation:
    """LigerFusedGateUpSiLUMulFunction on the adjacent gate and up halves of one GEMM's output."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return LIGER.unsupported_reason(context)

    def build(self, context: OpContext) -> Activate:
        from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

        def swiglu(gate_up: Tensor) -> Tensor:
            rows = gate_up.reshape(-1, gate_up.shape[-1])  # the kernel returns its gradient in this shape
            return LigerFusedGateUpSiLUMulFunction.apply(rows).view(*gate_up.shape[:-1], -1)

        return swiglu
