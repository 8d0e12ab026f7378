"""Optimizers. `needs` says what the sharding layer must supply; `state` is fp32 numbers kept for each parameter."""

from megascale.core.registry import Card, Registry

OPTIMIZERS = Registry(
    "optimizer",
    "megascale.optimizers",
    [
        Card(
            "adamw",
            "Adam with decoupled weight decay (Loshchilov and Hutter 2019)",
            "megascale.optim.adamw:AdamW",
            {"needs": "element", "state": 2},
        ),
    ],
)
