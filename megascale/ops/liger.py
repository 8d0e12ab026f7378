"""Liger's Triton kernels (Hsu et al. 2024) for norms and SwiGLU. Its rotary embedding is not used: it turns queries and
keys in place in tensors of their own, which ours, one with values, would have to be copied to.
"""

from __future__ import annotations

from torch import Tensor

from megascale.ops.activation import Activate
from megascale.ops.library import LIGER
from megascale.ops.norm import AddNormalize, Normalize, other_norm_asked
from megascale.ops.select import Setting


class LigerNorm:
    """LigerRMSNormFunction and LigerLayerNormFunction."""

    def refusal(self, setting: Setting) -> str | None:
        return LIGER.refusal(setting)

    def build(self, setting: Setting) -> Normalize:
        from liger_kernel.ops import LigerLayerNormFunction, LigerRMSNormFunction

        def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            # "gemma": the gain is applied before rounding. Not in place: that would write over autograd's gradient
            return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)

        def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            return LigerLayerNormFunction.apply(x, weight, bias, eps)

        return {"rmsnorm": rms_norm, "layernorm": layer_norm}[setting.model.norm]


class LigerAddNorm:
    """LigerFusedAddRMSNormFunction."""

    def refusal(self, setting: Setting) -> str | None:
        return LIGER.refusal(setting) or other_norm_asked(setting, "liger")

    def build(self, setting: Setting) -> AddNormalize:
        from liger_kernel.ops import LigerFusedAddRMSNormFunction

        def add_rms_norm(
            x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float
        ) -> tuple[Tensor, Tensor]:
            normed, total = LigerFusedAddRMSNormFunction.apply(branch, x, weight, eps, 0.0, "gemma", False)
            return total, normed

        return add_rms_norm


class LigerActivation:
    """LigerFusedGateUpSiLUMulFunction, which takes gate and up side by side as they come from one product."""

    def refusal(self, setting: Setting) -> str | None:
        return LIGER.refusal(setting)

    def build(self, setting: Setting) -> Activate:
        from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

        def swiglu(gate_up: Tensor) -> Tensor:
            rows = gate_up.reshape(-1, gate_up.shape[-1])  # its gradient comes back in this shape
            return LigerFusedGateUpSiLUMulFunction.apply(rows).view(*gate_up.shape[:-1], -1)

        return swiglu
