"""Optimizers. `state` is the number of fp32 values kept for each parameter; `needs` what the rule must be given
(`ops.optimizer`): elements of parameters, cut anywhere, or norms of whole parameters as well.
"""

from megascale.core.registry import Card, Registry

OPTIMIZERS = Registry(
    "optimizer",
    "megascale.optimizers",
    [
        Card(
            "adamw",
            "Adam with decoupled weight decay (Loshchilov and Hutter 2019)",
            "megascale.optim.adamw:AdamW",
            {"state": 2, "needs": "elements"},
        ),
        Card(
            "lamb",
            "Adam's updates scaled to the norm of each parameter, for large batches (You et al. 2020)",
            "megascale.optim.lamb:Lamb",
            {"state": 2, "needs": "norms"},
        ),
    ],
)
