"""Weights of training samples in the loss, by a plug-in (`data.sample_weight`). No torch."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import numpy as np

from megascale.core.errors import DataError

Weigh = Callable[[int, str, np.ndarray], "float | np.ndarray"]
"""weigh(sample, dataset, tokens): the number of a sample in the run, by which weights may change during training, the
prefix of the dataset that it is from, and its tokens [s + 1], i64, with the labels from the second on.
Returns the weight of the sample, or of each label [s].
"""


def equal(sample: int, dataset: str, tokens: np.ndarray) -> float:
    """Weigh all samples alike: a run is the same as without weights."""
    return 1.0


def weigh_labels(
    weigh: Weigh, name: str | None, sample: int, dataset: str, tokens: np.ndarray, mask: np.ndarray | None
) -> np.ndarray:
    """The weights [s] of a sample's labels, f32, by the plug-in `name`; `mask` leaves some labels out. Other arguments:
    as of `weigh`.

    Raises: DataError for weights that are negative or not finite, or of another number, and in place of any error of
    the plug-in, with its place
    """
    count = len(tokens) - 1
    try:
        found = np.asarray(weigh(sample, dataset, tokens), dtype=np.float32)
    except DataError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"data.sample_weight = {name} fails for sample {sample}, from {dataset}: {type(error).__name__}: {error}"
        raise DataError(what, hint=f"see {last.filename}:{last.lineno}") from None
    if found.shape not in ((), (count,)) or not np.isfinite(found).all() or (found < 0).any():
        what = f"data.sample_weight has found weights for sample {sample} in shape {list(found.shape)}"
        lowest, highest = (float(found.min()), float(found.max())) if found.size else (0.0, 0.0)
        hint = "one finite weight of 0 or above, or one for each label"
        raise DataError(f"{what}, from {lowest} to {highest}", hint=hint)
    return found * (np.ones(count, dtype=np.float32) if mask is None else mask.astype(np.float32))
