"""Optimizers. `state` is the number of fp32 values kept for each parameter."""

from megascale.core.registry import Card, Registry

OPTIMIZERS = Registry(
    "optimizer",
    "megascale.optimizers",
    [
        Card(
            "adamw",
            "Adam with decoupled weight decay (Loshchilov and Hutter 2019)",
            "megascale.optim.adamw:AdamW",
            {"state": 2},
        ),
    ],
)
