"""Traffic between the sites of a training."""

from __future__ import annotations

from megascale.config.run import RunConfig
from megascale.core.units import format_bytes
from megascale.layout.parameters import parameter_count


def describe_sites(config: RunConfig) -> str:
    """Say in a line what a site sends to each of the others, beside what data parallelism would; "" for one site."""
    sites, (_, wide) = config.sites, config.train.element_bytes
    if sites.count == 1:
        return ""
    parameters = parameter_count(config.model)
    sent, dense = sites.sent_bytes(parameters, wide), parameters * wide
    share = f"1/{dense * sites.every / sent:,.0f}"
    return (
        f"site {sites.index} of {sites.count}: outer steps send {format_bytes(sent)} to each other site every "
        f"{sites.every} steps, {format_bytes(sent // sites.every)} a step, {share} of the gradients"
    )
