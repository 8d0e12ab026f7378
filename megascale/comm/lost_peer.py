"""Errors of lost peers: torch's errors of a failed communication, as a `LostPeerError` that names group and peers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch.distributed import DistError

from megascale.core.errors import LostPeerError
from megascale.core.rank import format_ranks
from megascale.core.wait_notice import wait_notices
from megascale.operate.node.failure import is_peer_lost


def lost_peer_error(
    error: RuntimeError, what: str, group: str, ranks: Sequence[int], peers: Sequence[int]
) -> LostPeerError | None:
    """Return a `LostPeerError` for the error of a failed communication; None for an error of another kind.

    `what`: the communication, such as "all-reduce 'layer 3 qkv'". `ranks`: the group's global ranks. `peers`: those
    that the communication needed. A transport's own `LostPeerError` counts its peers within the group.
    """
    if isinstance(error, LostPeerError):
        peers = tuple(ranks[index] for index in error.peers) or peers
    elif not isinstance(error, DistError) and not is_peer_lost(error):
        return None
    whom = f"{'one of ' if len(peers) > 1 else ''}{format_ranks(peers)}"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LostPeerError(f"{what} of group {group} lost {whom}: {reason}", peers=peers)


@contextlib.contextmanager
def opening_group(group: str, ranks: Sequence[int], rank: int) -> Iterator[None]:
    """Open a group in the block: ranks that wait say so, and errors name the group and its other ranks.

    Raises: LostPeerError
    """
    peers = [other for other in ranks if other != rank]
    try:
        with wait_notices(f"rank {rank}", f"{format_ranks(peers)}, to connect group {group}"):
            yield
    except RuntimeError as error:
        if (lost := lost_peer_error(error, "the opening", group, ranks, peers)) is None:
            raise
        raise lost from error
