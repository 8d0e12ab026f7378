"""Seeds of random generators, derived from a key."""

from __future__ import annotations

import hashlib


def seed_of(*key: object) -> int:
    """Hash a key to a 63-bit seed, equal in every process."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
