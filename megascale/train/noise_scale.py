"""The gradient noise scale, measured in training (McCandlish et al. 2018, appendix A.1), in tokens.

The mean gradient over n tokens has the squared norm |G|^2 + trace / n in expectation, where G is the true gradient and
`trace` that of the covariance of one token's gradient. Two sizes give both: the whole batch of a step, whose norm is
known, and the first micro-batch of every data-parallel rank (`optim.first_gradient`), for one pass over the main
gradients and three more totals of the step:

    small = sum_i |g_i|^2 / sum_i n_i^2     g_i: gradient of the n_i tokens of micro-batch i, a sum
    u     = sum_i n_i / sum_i n_i^2         1 / n, if every micro-batch has n tokens
    trace = (small - |g|^2) / (u - w)       g: mean gradient of the step, w: 1 / its tokens
    |G|^2 = (u |g|^2 - w small) / (u - w)
    noise scale = average of trace / average of |G|^2

Both estimates are unbiased and noisy, and their ratio is biased, so each has an exponential moving average, from zero:
in the ratio the bias of a short average cancels. The layout changes only how many micro-batches are read: dp of them,
the first dp x batch.micro samples of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megascale.comm.mesh import Mesh
from megascale.config.train import TrainConfig
from megascale.optim.first_gradient import FirstGradient
from megascale.optim.replicated_state import ReplicatedState
from megascale.train.step_totals import StepTotals

STATE = "noise_scale"  # name of the saved averages [2], f64: of trace and of |G|^2


class NoiseScale(ReplicatedState):
    """The noise scale of a run, measured in every step that `train.noise_scale_every` divides, with its averages."""

    def __init__(self, settings: TrainConfig, gradient: FirstGradient, mesh: Mesh, device: torch.device) -> None:
        super().__init__({STATE: 2}, mesh, device)
        self._every = settings.noise_scale_every
        self._decay = settings.noise_scale_decay
        self._gradient = gradient
        self._averages = (0.0, 0.0)  # as they are saved
        self._measures = False

    @property
    def value(self) -> float | None:
        """The noise scale in tokens; None before a measurement, and while noise hides one of the averages."""
        trace, sq_gradient = self._averages
        return trace / sq_gradient if trace > 0 and sq_gradient > 0 else None

    def begin_step(self, step: int) -> None:
        """Begin a step, before its first action."""
        self._measures = step % self._every == 0
        if self._measures:
            self._gradient.begin()

    def add_totals(self, totals: StepTotals) -> None:
        """Add this rank's parts of the totals, after all reductions. A collective of all ranks."""
        if self._measures:
            tokens = float(totals.batch.micro_batches[0].sequence_loss_tokens)
            totals.add(first_sq_norm=self._gradient.local_sq_norm())
            totals.add_per_sequence(first_tokens=tokens, first_sq_tokens=tokens**2)

    def end_step(self, totals: Mapping[str, float], grad_norm: float) -> None:
        """Update the averages with the totals of a step and the norm of its mean gradient.

        A step of as many tokens as its only first micro-batch tells nothing: the beginning of a batch ramp-up.
        """
        if not self._measures or not totals["first_sq_tokens"]:
            return
        small = totals["first_sq_norm"] / totals["first_sq_tokens"]
        per_small, per_large = totals["first_tokens"] / totals["first_sq_tokens"], 1 / totals["tokens"]
        if per_small > per_large:
            found = estimate((small, per_small), (grad_norm**2, per_large))
            trace, sq_gradient = (
                self._decay * old + (1 - self._decay) * new for old, new in zip(self._averages, found, strict=True)
            )
            self._averages = (trace, sq_gradient)
            self.store(STATE, self._averages)

    def end_restore(self) -> None:
        """Begin anew with a checkpoint of a run that did not measure, where both are zero."""
        trace, sq_gradient = self.values(STATE)
        self._averages = (trace, sq_gradient)


def estimate(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """Estimate (trace, |G|^2) from the squared norms of two mean gradients, each with 1 / its number of tokens."""
    (small_norm, per_small), (large_norm, per_large) = small, large
    difference = per_small - per_large
    return (small_norm - large_norm) / difference, (per_small * large_norm - per_large * small_norm) / difference
