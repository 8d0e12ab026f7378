"""Learning-rate decays: lr(step) = min_lr + (lr - min_lr) * decay(step, total, decay_steps), after the warm-up.

`step` and `total`, the number of steps, count from the end of the warm-up. Decays are plain functions of integers:
`constant`, `linear`, `cosine`, `wsd`; a plot or a check needs no torch.
"""

import math

from megascale.core.registry import Card, Registry


def constant(step: int, total: int, decay_steps: int) -> float:
    """Stay at 1."""
    return 1.0


def linear(step: int, total: int, decay_steps: int) -> float:
    """Fall linearly to 0 at `total`."""
    return 1.0 - min(step / max(total, 1), 1.0)


def cosine(step: int, total: int, decay_steps: int) -> float:
    """Fall along half a cosine to 0 at `total` (Loshchilov and Hutter 2017, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * min(step / max(total, 1), 1.0)))


def wsd(step: int, total: int, decay_steps: int) -> float:
    """Stay at 1, then fall linearly over the last `decay_steps` (warmup-stable-decay; Hu et al. 2024, MiniCPM)."""
    return min(1.0, max(0.0, (total - step) / (decay_steps + 1)))


_WHOLE = {"uses_decay_steps": False}

DECAYS = Registry(
    "decay",
    "megascale.decays",
    [
        Card("constant", "stays at lr after the warm-up", "megascale.catalog.decays:constant", _WHOLE),
        Card("linear", "falls linearly from lr to min_lr", "megascale.catalog.decays:linear", _WHOLE),
        Card("cosine", "falls along half a cosine from lr to min_lr", "megascale.catalog.decays:cosine", _WHOLE),
        Card(
            "wsd", "stays at lr, falls linearly towards min_lr in the last decay_steps", "megascale.catalog.decays:wsd",
            {"uses_decay_steps": True},
        ),
    ],
    synonyms={
        "warmup_stable_decay": "wsd", "none": "constant", "sqrt": "", "inverse-square-root": "",
    },
)  # fmt: skip


def uses_decay_steps(decay: str) -> bool:
    """Return True if `optimizer.decay_steps` counts for a decay; also for an unknown one."""
    card = DECAYS.cards.get(decay)
    return card is None or bool(card.facts.get("uses_decay_steps", True))
