"""Apex's fused norms."""

from __future__ import annotations

from torch import Tensor

from megascale.ops.library import APEX
from megascale.ops.norm import Normalize
from megascale.ops.select import OpContext


class ApexNorm:
    """`fused_rms_norm_affine` and `fused_layer_norm_affine`, with fp32 statistics."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return APEX.unsupported_reason(context)

    def build(self, context: OpContext) -> Normalize:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

        def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            return fused_rms_norm_affine(x, weight, weight.shape, eps)

        def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)

        return {"rmsnorm": rms_norm, "layernorm": layer_norm}[context.model.norm]
