"""SPAM: Adam with clipped spikes and a reset of its moments (Huang et al. 2025, arXiv:2501.06842).

    every `reset_every` steps:  M = V = 0, and for `rewarmup` steps the rate rises again along a cosine
    where G^2 > theta V > 0:    G = sign(G) sqrt(theta V)
    W = W - lr (corrected M / (sqrt(corrected V) + eps) + weight_decay W)

Right after a reset V is no measure: for `settle` steps nothing is clipped. Nor is an element's first gradient since,
for V is 0: of a token that was not seen, or with state that begins anew. Steps of the bias correction count from the
reset.

With sparse momentum (`spam_sparse`) a matrix has moments for a share `density` of its elements, drawn by its name at
each reset, and a step moves these elements alone; the others only decay. The state is compact: 2 density m n elements,
and the number of the reset that they belong to. The default density is this project's. Each of density m n runs of
elements gives one, and runs begin anywhere: the owner finds the elements in every step without a mask in memory.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from megascale.core.seeds import seed_of
from megascale.ops.optimizer import Update, UpdateInput
from megascale.optim.adam import adam
from megascale.optim.contrib.counter_random import random_subset


def spam(given: UpdateInput) -> Update:
    """Return Adam's direction for a gradient without spikes, and the moments."""
    direction, moments = _update(given)
    if given.step % given.options["reset_every"] == 0:  # here too: the step of the reset may be skipped
        moments = {name: torch.zeros_like(values) for name, values in moments.items()}
    return direction, moments


def _update(given: UpdateInput) -> Update:
    o, state = given.options, given.state
    since, after_reset = (given.step - 1) % o["reset_every"], given.step > o["reset_every"]
    keep, grad = 1.0 if since else 0.0, given.grad
    moments = {name: state[name] * keep for name in ("exp_avg", "exp_avg_sq")}
    if since >= o["settle"]:
        limit = (o["theta"] * moments["exp_avg_sq"]).sqrt()
        grad = torch.where((grad.abs() > limit) & (limit > 0), grad.sign() * limit, grad)
    direction, moments = adam(replace(given, grad=grad, state=moments, step=since + 1))
    return direction * rewarmed(since, o["rewarmup"]) if after_reset else direction, moments


def spam_sparse(given: UpdateInput) -> Update:
    """Return SPAM's direction of a matrix [m, n], zero but for the drawn elements, and their moments."""
    flat, reset = given.grad.reshape(-1), (given.step - 1) // given.options["reset_every"]
    seed, count = seed_of("spam", given.name, reset), given.state["exp_avg"].numel()
    drawn = random_subset(seed, flat.numel(), count, flat.device)
    is_theirs = given.state["resets"] == reset  # not if the step of the reset was skipped
    state = {name: given.state[name] * is_theirs for name in ("exp_avg", "exp_avg_sq")}
    moved, moments = _update(replace(given, grad=flat[drawn], state=state))
    direction = torch.zeros_like(flat).index_copy(0, drawn, moved).view_as(given.grad)
    return direction, {**moments, "resets": torch.full_like(given.state["resets"], reset)}


def rewarmed(since: int, steps: int) -> float:
    """Return the factor of the learning rate, `since` steps after a reset."""
    return 1.0 if since >= steps else 1 - 0.99 * 0.5 * (1 + math.cos(math.pi * (since + 1) / (steps + 1)))
