"""Rules of plug-ins for data: `data.policy`, which changes the weights of the blend, and `data.sample_weight`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megascale.catalog.data_policies import DATA_POLICIES
from megascale.config.finding import Finding, Rule

EVERY = 100
"""Steps between updates by default."""


def policy_every(config: Any) -> int:
    """The steps between updates of the weights."""
    return int(config.data.policy_every or EVERY)


def data_policy(c: Any) -> Iterator[Finding]:
    """Check that there is a blend that a policy can change, and that its updates are far enough apart."""
    d, key = c.data, "data.policy"
    if d.policy is None:
        if d.policy_every is not None:
            yield Finding("data.policy_every", "has no effect without a policy", "data.policy, or remove the key")
        return
    if d.mock or not isinstance(d.train, list):
        message = "changes the weights of a blend, and data.train is none"
        yield Finding(key, message, "data.train = [[weight, prefix], ...]")
    if d.weights:
        yield Finding(key, "and data.weights both change the weights of the blend", "only one of them")
    if d.packing == "decompose":
        yield Finding(key, "cannot change the weights with packing = decompose", "data.packing = concat or best_fit")
    if (every := policy_every(c)) < d.prefetch + 2:
        message = f"{every} is below prefetch + 2, the steps after which new weights begin"
        yield Finding("data.policy_every", message, f"{d.prefetch + 2} or more")
    if DATA_POLICIES[d.policy].facts.get("uses_losses") and c.batch.micro != 1:
        message = (
            f"{d.policy} uses the losses by dataset, and a micro-batch of {c.batch.micro} samples may have several"
        )
        yield Finding(key, message, "batch.micro = 1")


def sample_weight(c: Any) -> Iterator[Finding]:
    """Check that there are samples to weigh, and that nothing takes sums of weights for numbers of tokens."""
    if c.data.sample_weight and c.data.mock:
        yield Finding("data.sample_weight", "has no effect on mock data", "data.train, or remove the key")
    if c.data.sample_weight and c.train.noise_scale_every:
        message = "the noise scale is in tokens, and data.sample_weight gives them unequal weights"
        yield Finding("train.noise_scale_every", message, "0, or remove data.sample_weight")


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = ((("batch", "data"), data_policy), (("data", "train"), sample_weight))
"""(sections that the rule reads, rule), as in `rules`."""
