"""This rank's shard of a bucket's master weights and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megascale.parallel.param_and_grad_buffers import Bucket


@dataclass(frozen=True)
class OptimizerShard:
    """Master weights and optimizer state of one bucket on this rank, all [size of the shard].

    `master` is a view of the bucket's weights if the weights have the optimizer's dtype.
    """

    bucket: Bucket
    master: Tensor
    state: dict[str, Tensor]

    @property
    def has_own_master(self) -> bool:
        """True if `master` is a separate tensor, to be rounded into the bucket's weights after an update."""
        return self.master.dtype != self.bucket.weights.dtype

    def publish(self) -> None:
        """Round a separate `master` into this rank's shard of the bucket's weights."""
        if self.has_own_master:
            self.bucket.shard_weights.copy_(self.master)

    @property
    def bytes(self) -> int:
        """Bytes of optimizer state and separate master weights."""
        return sum(t.nbytes for t in self.state.values()) + (self.master.nbytes if self.has_own_master else 0)
