"""Liger's Triton kernels (Hsu et al. 2024) for norms and SwiGLU."""

from __future__ import annotations

from torch import Tensor

from megascale.ops.activation import Activate
from megascale.ops.library import LIGER
from megascale.ops.norm import Normalize
from megascale.ops.select import Setting

WIDEST = 65536
"""Columns that a kernel takes at most: a row is one block."""


class LigerNorm:
    """LigerRMSNormFunction and LigerLayerNormFunction."""

    def refusal(self, setting: Setting) -> str | None:
        return LIGER.refusal(setting) or _too_wide(setting.model.hidden_size)

    def build(self, setting: Setting) -> Normalize:
        from liger_kernel.ops import LigerLayerNormFunction, LigerRMSNormFunction

        def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            # "gemma": the gain is applied before rounding. Not in place: that would write over autograd's gradient
            return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)

        def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            return LigerLayerNormFunction.apply(x, weight, bias, eps)

        return {"rmsnorm": rms_norm, "layernorm": layer_norm}[setting.model.norm]


class LigerActivation:
    """LigerFusedGateUpSiLUMulFunction, which takes gate and up side by side as they come from one product."""

    def refusal(self, setting: Setting) -> str | None:
        return LIGER.refusal(setting) or _too_wide(setting.model.ffn_size // setting.tp)

    def build(self, setting: Setting) -> Activate:
        from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

        def swiglu(gate_up: Tensor) -> Tensor:
            rows = gate_up.reshape(-1, gate_up.shape[-1])  # its gradient comes back in this shape
            return LigerFusedGateUpSiLUMulFunction.apply(rows).view(*gate_up.shape[:-1], -1)

        return swiglu


def _too_wide(columns: int) -> str | None:
    return f"takes at most {WIDEST} columns, not {columns}" if columns > WIDEST else None
