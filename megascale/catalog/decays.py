"""Learning-rate schedules: the fraction of (lr - min_lr) that is left at a step after the warm-up.

Each takes the step counted from the end of the warm-up, the step after the last counted likewise, and `decay_steps`:
plain numbers, so that a schedule can be plotted and checked without torch.
"""

import math

from megascale.core.registry import Card, Registry


def constant(step: int, total: int, decay_steps: int) -> float:
    """No decay."""
    return 1.0


def linear(step: int, total: int, decay_steps: int) -> float:
    """A straight line to zero."""
    return 1.0 - min(step / max(total, 1), 1.0)


def cosine(step: int, total: int, decay_steps: int) -> float:
    """Half a cosine to zero (Loshchilov and Hutter 2017, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * min(step / max(total, 1), 1.0)))


def wsd(step: int, total: int, decay_steps: int) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM), with a linear decay."""
    return min(1.0, max(0.0, (total - step) / (decay_steps + 1)))


DECAYS = Registry(
    "decay",
    "megascale.decays",
    [
        Card("constant", "stays at lr after the warm-up", "megascale.catalog.decays:constant"),
        Card("linear", "falls linearly from lr to min_lr", "megascale.catalog.decays:linear"),
        Card("cosine", "falls along half a cosine from lr to min_lr", "megascale.catalog.decays:cosine"),
        Card(
            "wsd", "stays at lr, falls linearly towards min_lr in the last decay_steps", "megascale.catalog.decays:wsd"
        ),
    ],
)
