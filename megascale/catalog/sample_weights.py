"""Weights of training samples in the loss (`data.sample_weight`)."""

from megascale.core.registry import Card, Registry

SAMPLE_WEIGHTS = Registry(
    "sample weight",
    "megascale.sample_weights",
    [Card("equal", "all samples alike", "megascale.data.mix.label_weights:equal")],
    synonyms={"none": "equal", "uniform": "equal"},
)
