"""The input of a depth of multi-token prediction (DeepSeek-V3, 2.2): `DepthInput`.

W [norm(embedding of the token); norm(hidden state)]        W [h, 2 h], equal on the ranks of tp
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megascale.config.model import ModelConfig
from megascale.layout.parts.elementwise import norm_params
from megascale.layout.parts.linear import linear_params
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes, UnitBytes
from megascale.layout.parts.part import LinearSpec, Part, Surroundings
from megascale.layout.parts.times import OperationTimes, PassTimes
from megascale.layout.tensors import TOKEN_EMBEDDING, ParamSpec


@dataclass(frozen=True)
class DepthInput(Part):
    """Both norms and the projection W of `hidden` elements; the embedding has its weight from the model."""

    hidden: int

    @property
    def token_weights(self) -> int:
        return 2 * self.hidden**2

    @property
    def whole_numel(self) -> int:
        return self.token_weights

    def params(self, block: str, model: ModelConfig) -> list[ParamSpec]:
        norms = (norm_params(f"{block}.{norm}", model) for norm in ("embedding_norm", "hidden_norm"))
        merge = LinearSpec("merge", "merge", 2 * self.hidden, (("merge", self.hidden),), fp8=False)
        return [*(param for each in norms for param in each), *linear_params(f"{block}.merge", model, merge)]

    def traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the collectives of the embedding."""
        width = self.hidden * sizes.compute
        if backward and TOKEN_EMBEDDING not in sizes.frozen:
            yield from sizes.gather("embedding gradient", sizes.rows, width)
        elif not backward:
            yield sizes.reduce("embedding", sizes.rows, width)

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        """Account for the embedded tokens and both norms, whose results lie beside each other for W."""
        weight = self.token_weights * sizes.compute * sizes.narrow
        saved = 2 * sizes.norm_saved + 2 * sizes.stream + sizes.tokens * (1 if sizes.tp > 1 else 0)
        embedding = sizes.full + sizes.full // sizes.compute * sizes.wide
        backward = 2 * sizes.stream + max(weight, 2 * sizes.stream + sizes.norm_backward, embedding)
        left = 3 * sizes.stream + sizes.full
        return UnitBytes(saved, 3 * sizes.stream, backward, left=left, wgrad=max(weight, embedding - sizes.full))

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        lookup, norms, copies = 2 * times.stream, 4 * times.stream, 4 * times.stream
        sums = times.linears((), fp8=False, enters=False, width=self.hidden)  # of the embedding over tp
        return times.local_linear(self.hidden, 2 * self.hidden) + sums + times.passes(lookup + norms + copies)
