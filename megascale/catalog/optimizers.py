"""Optimizers. Facts: `state_tensors`, the number of fp32 state elements per parameter; `unit_of_work`, the input of
the update rule (`ops.optimizer`): "elements", arbitrary slices, or "param_norms", norms of full parameters as well.
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
            {"state_tensors": 2, "unit_of_work": "elements"},
        ),
        Card(
            "lamb",
            "Adam's updates scaled to the norm of each parameter, for large batches (You et al. 2020)",
            "megascale.optim.lamb:Lamb",
            {"state_tensors": 2, "unit_of_work": "param_norms"},
        ),
    ],
    synonyms={
        "adam": "adamw",
        "fused_adam": "adamw",
        "fusedadam": "adamw",
        "adamw_torch": "adamw",
        "sgd": "",
        "lion": "",
        "muon": "",
        "adafactor": "",
    },
)
