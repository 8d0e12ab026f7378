"""Random bits of stochastic rounding that no layout changes: those of an element follow from its global place alone.

    key       the run's seed mixed with layer, operand and direction; the step
    counter   a row, and a block of `DITHERED` elements along k (`ops.philox`)

A row or an element is a feature of the whole layer, or a token: sample x sequence length + position. The same bits
therefore round a token in every tp, sp, cp, pp and dp, in any micro-batch, in recomputation and in a split backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.catalog.recipes import DITHERED
from megascale.core.seeds import seed_of
from megascale.layout.tensors import ParamSpec
from megascale.layout.topology import Coord, Topology
from megascale.ops.philox import WORD
from megascale.ops.recipe import Dither
from megascale.parallel.microbatch import MicroBatch


@dataclass(frozen=True)
class LayerDither:
    """The random bits of a linear layer's operands. `outputs`, `inputs`: the global numbers, i64, of the features that
    this rank's weight [n, k] has.
    """

    layer: str
    seed: int
    outputs: Tensor
    inputs: Tensor

    @classmethod
    def of(cls, weight: ParamSpec, seed: int, topology: Topology, coord: Coord, device: torch.device) -> LayerDither:
        """Number the features of a rank's shard; those of stacked parts follow each other."""
        outputs, inputs, before = list[Tensor](), torch.empty(0), 0
        for part in weight.parts:
            (first, left), (rows, columns) = part.local_box(topology, coord)
            outputs.append(torch.arange(before + first, before + first + rows, device=device))
            inputs = torch.arange(left, left + columns, device=device)
            before += part.shape[0]
        return cls(weight.name, seed, torch.cat(outputs), inputs)

    def place(self, operand: str, step: int, tokens: Tensor, *, transposed: bool) -> Dither:
        """Return the place of the operand input, weight or gradient, or of its transpose. `tokens` [s, b], i64: the
        numbers of tokens. A transpose has them sample by sample.
        """
        rows = self.outputs if operand == "weight" else (tokens.t() if transposed else tokens).flatten()
        columns = self.outputs if operand == "gradient" else self.inputs
        rows, k = (columns, rows) if transposed else (rows, columns)
        seed = seed_of(self.seed, "rounding", self.layer, operand, "column" if transposed else "row")
        return Dither((seed & WORD, step & WORD), rows, k[::DITHERED] // DITHERED & WORD)


def number_tokens(batch: MicroBatch, length: int, device: torch.device) -> Tensor:
    """Number the tokens of a micro-batch [s, b], i64, in sequences of `length`: those of this rank's shard."""
    spans = [(0, length)] if batch.shard is None else batch.shard.spans
    samples = [sample * length for sample in batch.dropout.samples]
    rows = [
        torch.cat([torch.arange(first + start, first + stop, device=device) for start, stop in spans])
        for first in samples
    ]
    return torch.stack(rows, 1)
