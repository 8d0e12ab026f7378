"""Spectrum (Hartford et al. 2024, arXiv:2406.06623): the weights of a checkpoint to train further, by the
signal-to-noise ratio of their singular values.

For a matrix [n, m] with singular values s and noise of standard deviation sigma in its elements,

    sigma = IQR of the elements / 1.349        edge = sigma (sqrt(n) + sqrt(m))     (Marchenko and Pastur 1967)
    SNR = (sum of s above the edge / sum of s up to it) / largest s

The edge is sigma sqrt(max) (1 + sqrt(min / max)), of dimensions: without a signal no value is above it. The authors'
script takes the IQR of the singular values for that of the elements, and leaves out sqrt(max).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from megascale.checkpoint.format import manifest
from megascale.convert.saved_weights import SavedWeights, saved_model
from megascale.core.storage import Location
from megascale.layout.parameters import all_params

NORMAL_IQR = 1.349  # interquartile range of a normal distribution of standard deviation 1


Snrs = dict[tuple[str, ...], float]
"""The SNR of weights, by the names of the tensors that each is made of."""


def signal_to_noise(matrix: Tensor) -> float:
    """Compute the SNR of a matrix [n, m]; infinite if all singular values are signal, 0 of zeros."""
    values = torch.linalg.svdvals(matrix.double())
    elements = matrix.double().flatten().sort().values
    low, high = (elements[round(share * (len(elements) - 1))] for share in (0.25, 0.75))
    edge = (high - low) / NORMAL_IQR * sum(map(math.sqrt, matrix.shape))
    signal, noise = values[values > edge].sum(), values[values <= edge].sum()
    return float(signal / noise / values[0]) if values[0] > 0 else 0.0


def measure(source: Location) -> dict[str, Snrs]:
    """Measure the weights of all linear layers of a checkpoint, by their kinds, names without the number of the layer;
    of a stack of matrices, such as experts', the mean. Raises: CheckpointError
    """
    saved = manifest.read(source)
    weights, found = SavedWeights(source, saved), defaultdict[str, Snrs](dict)
    for parameter in (each for each in all_params(saved_model(source, saved)) if each.kind == "matrix"):
        names = tuple(tensor.name for tensor in parameter.parts)
        matrices = torch.cat([*map(weights.read, names)], -2)
        values = [*map(signal_to_noise, matrices.view(-1, *matrices.shape[-2:]))]
        found[re.sub(r"^layers\.\d+", "layers.*", parameter.name)][names] = math.fsum(values) / len(values)
    return found


def frozen_tensors(kinds: Mapping[str, Snrs], top: float) -> list[str]:
    """List the tensors of the weights of each kind that are not among its `top` share, at least one, by SNR."""
    frozen = list[str]()
    for weights in kinds.values():
        last = sorted(weights, key=lambda names: -weights[names])[max(1, math.ceil(top * len(weights))) :]
        frozen += [name for names in weights if names in last for name in names]
    return frozen
