"""Traffic between the sites of a training."""

from __future__ import annotations

from megascale.config.model import ModelConfig
from megascale.config.sites import SitesConfig
from megascale.config.train import TrainConfig
from megascale.core.units import format_bytes
from megascale.layout.parameters import parameter_count


def describe_sites(sites: SitesConfig, model: ModelConfig, train: TrainConfig) -> str:
    """Say in a line what a site sends to each of the others, beside what data parallelism would; "" for one site."""
    if sites.count == 1:
        return ""
    parameters, (_, wide) = parameter_count(model), train.element_bytes
    sent, dense = sites.sent_bytes(parameters, wide), parameters * wide
    share = f"1/{dense * sites.every / sent:,.0f}"
    return (
        f"site {sites.index} of {sites.count}: outer steps send {format_bytes(sent)} to each other site every "
        f"{sites.every} steps, {format_bytes(sent // sites.every)} a step, {share} of the gradients"
    )
