"""What any part of the network needs while it runs: a tape on which bytes come and go; norms; products on their way
into a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config.run import RunConfig
from megascale.plan.activations import Sizes


@dataclass
class Tape:
    """Bytes that come and go, operation by operation. `most`: at once."""

    now: int = 0
    most: int = 0

    def need(self, nbytes: int) -> None:
        """For a moment."""
        self.most = max(self.most, self.now + nbytes)

    def hold(self, nbytes: int) -> None:
        """From here on."""
        self.need(nbytes)
        self.now += nbytes

    def free(self, nbytes: int) -> None:
        """Not any longer."""
        self.now -= nbytes


def norm_forward(sizes: Sizes, norm: str) -> int:
    """Beyond its input, with its result; in fp32 where that is wider."""
    numbers = sizes.residual // sizes.compute
    if norm == "rmsnorm" and sizes.compute < sizes.wide:
        return 2 * numbers * sizes.wide + sizes.residual
    return sizes.residual


def norm_backward(sizes: Sizes, norm: str) -> int:
    """Beyond its input and its result's gradient, with the input's."""
    numbers, copies = sizes.residual // sizes.compute, sizes.compute < sizes.wide
    if norm == "rmsnorm":
        return 4 * numbers * sizes.wide + sizes.residual if copies else 3 * sizes.residual
    return 3 * numbers * sizes.wide if copies else sizes.residual


def into_gradient(sizes: Sizes, numbers: int) -> int:
    """For a product that is added to a weight's gradient; one of the same format is formed there."""
    return numbers * sizes.compute if sizes.compute < sizes.wide else 0


def is_cut(config: RunConfig) -> bool:
    """Whether activations between linear layers are cut over tp."""
    return config.parallel.sp and config.parallel.tp > 1
