"""Adam as a function, of any range of elements or of a matrix (Kingma and Ba 2015; weight decay as in AdamW).

M = beta1 M + (1 - beta1) G,  V = beta2 V + (1 - beta2) G^2
W = W - lr (corrected M / (sqrt(corrected V) + eps) + weight_decay W)
"""

from __future__ import annotations

import math
from typing import Any

from megascale.config.train import OptimizerConfig
from megascale.ops.optimizer import Update, UpdateInput


def adam(given: UpdateInput) -> Update:
    """Return Adam's direction, and the moments."""
    o, grad = given.options, given.grad
    exp_avg = given.state["exp_avg"].lerp(grad, 1 - o["beta1"])
    exp_avg_sq = given.state["exp_avg_sq"].lerp(grad.square(), 1 - o["beta2"])
    step = given.step if o.get("bias_correction", True) else math.inf
    root = (exp_avg_sq / (1 - o["beta2"] ** step)).sqrt() + o["eps"]
    return exp_avg / (1 - o["beta1"] ** step) / root, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def adam_options(config: OptimizerConfig) -> dict[str, Any]:
    """Return the options of `adam` for the keys of `[optimizer]`."""
    beta1, beta2 = config.betas
    return {"beta1": beta1, "beta2": beta2, "eps": config.eps, "bias_correction": config.bias_correction}
