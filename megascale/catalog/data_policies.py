"""Data policies, which change the weights of a blend during training. Fact: `uses_losses`, the losses by dataset."""

from megascale.core.registry import Card, Registry

DATA_POLICIES = Registry(
    "data policy",
    "megascale.data_policies",
    [
        Card(
            "fixed",
            "leaves the weights as they are, such as those that another policy has found",
            "megascale.data.mix.data_policy:Fixed",
            {"uses_losses": False},
        ),
    ],
    synonyms={"none": "fixed", "static": "fixed"},
)
