"""Watches what casts to 8 bits lose: a rise is said before the loss shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from megascale.parallel.eight_bit import Lost

LEAST = {"saturated": 1e-3, "underflow": 0.05}
"""Shares of a tensor's numbers below which no rise is worth a word."""

RISE = 4.0
"""How many times the usual share is a rise."""

MEMORY = 0.9
"""How much of the usual share is kept when a new one comes."""

FEW = 3
"""Records after which a share is usual, and tensors that a warning names."""


class CastMonitor:
    """The usual shares of each tensor: means that forget."""

    def __init__(self) -> None:
        self._usual: dict[tuple[str, str], float] = {}
        self._records = 0

    def remember(self, metrics: Path) -> None:
        """Take up the shares that a run has recorded which now goes on."""
        for line in metrics.read_text(encoding="utf-8").splitlines():
            found = json.loads(line).get("fp8") or {}
            list(self.rises({name: Lost(**lost) for name, lost in found.items()}))  # they were said then

    def rises(self, lost: Mapping[str, Lost]) -> Iterator[str]:
        """What to say of the tensors that lose far more than usual."""
        if not lost:
            return
        for kind, least in LEAST.items():
            shares = {name: float(getattr(found, kind)) for name, found in lost.items()}
            usual = {name: self._usual.get((name, kind), share) for name, share in shares.items()}
            risen = [n for n, share in shares.items() if share > max(least, RISE * usual[n])]
            if risen and self._records >= FEW:
                named = ", ".join(f"{name} {shares[name]:.1%} (usually {usual[name]:.1%})" for name in risen[:FEW])
                more = f" and {len(risen) - FEW} more" if len(risen) > FEW else ""
                verb = "saturate" if kind == "saturated" else "become zero"
                yield f"more numbers than usual {verb} in fp8: {named}{more}"
            for name, share in shares.items():
                self._usual[name, kind] = MEMORY * usual[name] + (1 - MEMORY) * share
        self._records += 1
