"""Epochs of datasets that are open at the same time, within the limits of open files and memory maps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class OpenEpochs:
    """The epochs used last, at most `capacity`. An epoch that is closed is opened again at its next use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._open: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, open_epoch: Callable[[], Any]) -> Any:
        """Return the epoch of `key`, opened by `open_epoch` if it is closed."""
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        while len(self._open) >= self.capacity:
            self._open.popitem(last=False)
        epoch = self._open[key] = open_epoch()
        return epoch

    def __len__(self) -> int:
        return len(self._open)
