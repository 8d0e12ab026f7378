"""What an optimizer holds of one bucket on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megascale.parallel.gradients import Bucket


@dataclass(frozen=True)
class ShardState:
    """What the optimizer holds for one bucket: the weights that it updates, and its state, each [size of the shard].

    `master` is the shard of the bucket's own weights where these have the optimizer's format.
    """

    bucket: Bucket
    master: Tensor
    state: dict[str, Tensor]

    @property
    def separate(self) -> bool:
        """Whether `master` is a copy of its own, to be rounded into the bucket's weights."""
        return self.master.dtype != self.bucket.weights.dtype

    def publish(self) -> None:
        """Round a separate `master` into this rank's shard of the bucket's weights."""
        if self.separate:
            self.bucket.shard_weights.copy_(self.master)

    @property
    def bytes(self) -> int:
        """Bytes that the optimizer adds to the bucket's."""
        return sum(t.nbytes for t in self.state.values()) + (self.master.nbytes if self.separate else 0)
