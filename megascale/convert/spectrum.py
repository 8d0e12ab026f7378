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
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.checkpoint.format import manifest
from megascale.convert.saved_weights import SavedWeights, saved_model
from megascale.core.storage import Location
from megascale.layout.parameters import all_params

NORMAL_IQR = 1.349  # interquartile range of a normal distribution of standard deviation 1


class ModuleSnr(NamedTuple):
    """The SNR of a weight, with the names of its tensors; `kind`: its name without the number of the layer."""

    kind: str
    tensors: tuple[str, ...]
    snr: float


def signal_to_noise(matrix: Tensor) -> float:
    """Compute the SNR of a matrix [n, m]; infinite if all singular values are signal, 0 of zeros."""
    values = torch.linalg.svdvals(matrix.double())
    elements = matrix.double().flatten().sort().values
    low, high = (elements[round(share * (len(elements) - 1))] for share in (0.25, 0.75))
    edge = (high - low) / NORMAL_IQR * sum(map(math.sqrt, matrix.shape))
    signal, noise = values[values > edge].sum(), values[values <= edge].sum()
    return float(signal / noise / values[0]) if values[0] > 0 else 0.0


def measure(source: Location) -> list[ModuleSnr]:
    """Measure the weights of all linear layers of a checkpoint; of a stack of matrices, such as experts', the mean.

    Raises: CheckpointError
    """
    saved = manifest.read(source)
    weights, found = SavedWeights(source, saved), list[ModuleSnr]()
    for parameter in all_params(saved_model(source, saved)):
        if parameter.kind != "matrix":
            continue
        parts = [weights.read(tensor.name) for tensor in parameter.parts]
        matrices = torch.cat(parts, -2).flatten(0, -3) if parts[0].dim() > 2 else torch.cat(parts)[None]
        snr = math.fsum(map(signal_to_noise, matrices)) / len(matrices)
        first, _, rest = parameter.name.partition(".")
        kind = f"{first}.*.{rest.partition('.')[2]}" if first == "layers" else parameter.name
        found.append(ModuleSnr(kind, tuple(tensor.name for tensor in parameter.parts), snr))
    return found


def frozen_tensors(modules: list[ModuleSnr], top: float) -> list[str]:
    """List the tensors of the modules of each kind that are not among its `top` share, at least one, by SNR."""
    by_kind = defaultdict[str, list[ModuleSnr]](list)
    for module in modules:
        by_kind[module.kind].append(module)
    frozen = set[str]()
    for alike in by_kind.values():
        order = sorted(alike, key=lambda module: -module.snr)
        frozen.update(name for module in order[max(1, math.ceil(top * len(order))) :] for name in module.tensors)
    return [name for module in modules for name in module.tensors if name in frozen]
