"""Apex's fused norms."""

from __future__ import annotations

from torch import Tensor

from megascale.ops.library import APEX
from megascale.ops.norm import Normalize
from megascale.ops.select import Setting


class ApexNorm:
    """`fused_rms_norm_affine` and `fused_layer_norm_affine`; statistics are kept in fp32."""

    def refusal(self, setting: Setting) -> str | None:
        return APEX.refusal(setting)

    def build(self, setting: Setting) -> Normalize:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

        def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            return fused_rms_norm_affine(x, weight, weight.shape, eps)

        def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)

        return {"rmsnorm": rms_norm, "layernorm": layer_norm}[setting.model.norm]
