"""Multi-head latent attention (MLA; DeepSeek-AI 2024): q, k and v of all heads are projected from latent vectors.

    q latent, kv latent, shared key = x W_down      of a rank's own tokens; W_down is replicated over tp
    q = norm(q latent) W_q    k, v = norm(kv latent) W_kv    column-parallel; with sequence parallelism the latents are
                                                             all-gathered, which are narrower than x
    every head's q and k end with rotated elements; those of k are the shared key

Attention runs with v padded to the width of q and k, which all kernels take. `LatentProjections`: the linear layers;
`LatentAttentionSpec`: the attention core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megascale.config.model import ModelConfig
from megascale.layout.parts.attention import AttentionSpec
from megascale.layout.parts.linear import ColumnParallel, RowParallel, linear_params
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes, UnitBytes, walk
from megascale.layout.parts.part import LinearSpec, Part, Scores, Surroundings, TokenFlops
from megascale.layout.parts.times import OperationTimes, PassTimes
from megascale.layout.tensors import ParamSpec, TensorSpec


@dataclass(frozen=True)
class LatentProjections(Part):
    """The linear layers before the core: `down` to the latents and the shared key; `queries`, `keys` (and values) from
    them. `ranks`: names and widths of the latents that are normalized; without one for queries these are of x.
    """

    down: LinearSpec
    queries: ColumnParallel
    keys: ColumnParallel
    ranks: tuple[tuple[str, int], ...]
    heads: int
    shared_key: int

    enters = True

    @property
    def parts(self) -> tuple[ColumnParallel, ColumnParallel]:
        return self.queries, self.keys

    @property
    def whole_numel(self) -> int:
        return self.down.weight_numel

    @property
    def token_weights(self) -> int:
        return self.whole_numel + super().token_weights

    def params(self, block: str, model: ModelConfig) -> list[ParamSpec]:
        """The parameters. muP takes the widths of latents as given: what is projected from one keeps its scale."""
        gains = [(f"{block}.attention.{name}_norm.weight", width) for name, width in self.ranks]
        fixed = model.model_copy(update={"mup_base_width": 0})
        queries = self.queries.params(block, fixed if len(self.ranks) > 1 else model)
        return [
            *linear_params(f"{block}.{self.down.name}", model, self.down),
            *(ParamSpec(gain, (TensorSpec(gain, (width,), init=1.0),), "norm") for gain, width in gains),
            *map(self._by_head, [*queries, *self.keys.params(block, fixed)]),
        ]

    def _by_head(self, param: ParamSpec) -> ParamSpec:
        """Name the rows of a head in each part."""
        parts = tuple(replace(part, head_dim=part.shape[0] // self.heads) for part in param.parts)
        return replace(param, parts=parts)

    def traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the collectives of the column-parallel layers, and of the shared key, whose gradient is a sum."""
        yield from super().traffic(sizes, backward)
        width = self.shared_key * sizes.compute
        if backward:
            yield sizes.reduce("shared key gradient", sizes.rows, width)
        else:
            yield from sizes.gather("shared key", sizes.rows, width)

    def recomputes_input(self, sizes: MicroBatchSizes) -> bool:
        return sizes.recompute.norm and not sizes.saves_codes

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        """Account for the layers in turn, and for the norms of latents."""
        local, again = sizes.local * sizes.compute, self.recomputes_input(sizes)
        latents, normed = local * self.down.outputs, local * sum(width for _, width in self.ranks)
        own = sizes.stream if at.before is not None and at.before.normalizes else 0
        weight = self.whole_numel * sizes.compute * sizes.narrow
        first = UnitBytes(
            0 if again else sizes.stream, latents, sizes.stream * (1 + again) + weight, own - latents,
            left=(0 if again else sizes.stream) + latents, wgrad=weight,
        )  # fmt: skip
        wide = normed // sizes.compute * sizes.wide * (4 if sizes.narrow else 3)
        steps = [first, UnitBytes(latents + len(self.ranks) * sizes.local * sizes.wide, normed, wide)]
        alive = 0
        for part in self.parts:
            (layer,) = part.layers
            outputs, inputs = sizes.sharded(layer.outputs), local * layer.inputs
            gathered = sizes.parts * inputs if sizes.cut else 0
            of_x, stored = layer.inputs == self.down.inputs, sizes.saved_input(inputs, layer.inputs, whole=False)
            kept, added = (0, 0) if of_x else (stored * (not again), inputs)
            wgrad = 2 * gathered + sizes.wgrad(layer.weight_numel, outputs)
            forward, backward = alive + gathered + outputs, wgrad + inputs * (1 + again)
            left = outputs + (0 if of_x else stored)
            steps.append(UnitBytes(kept, forward, backward, added - outputs, left=left, wgrad=wgrad))
            alive += outputs
        results = alive + sizes.tokens * self.shared_key * sizes.compute
        walked = walk(steps, results, sizes.split)
        return walked._replace(backward=walked.backward - results, gradient=own - results)

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        """Time the layers, and the norms of latents, a read and a write each."""
        local = times.stream // self.down.inputs
        total = times.local_linear(self.down.outputs, self.down.inputs)
        total += times.passes(2 * local * sum(width for _, width in self.ranks))
        return sum((part.seconds(times, fp8) for part in self.parts), start=total)


@dataclass(frozen=True)
class LatentAttentionSpec(AttentionSpec):
    """The attention core of heads with `value_dim` elements of v, padded to head_dim, and `shared_key` of k that all
    heads share. head_dim counts all elements of q and k.
    """

    value_dim: int = 0
    shared_key: int = 0

    def flops(self, scores: Scores) -> TokenFlops:
        flops_per_key = 2 * self.heads * (self.head_dim + self.value_dim)
        full, causal = scores[self.window]
        return TokenFlops(0, flops_per_key * full, flops_per_key * causal)

    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        """Account for attention of padded heads, for the projections that they are put together from, with the rotated
        parts, and for the result that is cut. Heads that are tensors of their own are freed once they are copied.
        """
        of_padded, recomputed = super().memory(sizes, at), sizes.recompute.attention
        padded, result, rotated = (
            sizes.sharded(self.heads * width) for width in (self.head_dim, self.value_dim, self.shared_key)
        )
        qkv, given = 3 * padded, 2 * padded - rotated + result + sizes.tokens * self.shared_key * sizes.compute
        kept = 0 if self.result_apart(sizes) or sizes.model.dropout else padded
        copied = sizes.model.dropout or (sizes.key_parts > 1 and sizes.cp_heads == 1)
        kept -= 2 * padded if copied else 0
        saved, forward, backward = kept, given + rotated + result - 2 * qkv, padded - result
        if recomputed:
            saved, forward, backward = given - qkv, forward + padded + kept + qkv, kept + padded + result
        added = saved + of_padded.saved, forward + of_padded.forward, backward + of_padded.backward
        return UnitBytes(*added, given - result)

    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        """Time the core and the passes in which heads are put together and cut."""
        return super().seconds(times, fp8) + times.passes(times.tokens * self.qkv_width // times.sizes.tp)


def latent_branch(model: ModelConfig, layer: int) -> tuple[Part, ...]:
    """Latent attention with its linear layers."""
    width = model.num_heads * model.value_head_dim
    out = LinearSpec("attention.out", "out", width, (("out", model.hidden_size),))
    return *latent_attention(model, layer), RowParallel((out,))


def latent_attention(model: ModelConfig, layer: int) -> tuple[LatentProjections, LatentAttentionSpec]:
    """The parts of latent attention, as `[model]` describes it, but for the output projection."""
    heads, shared = model.num_heads, model.rope_head_dim
    latents = [("q_latent", model.q_lora_rank)] * (model.q_lora_rank > 0) + [("kv_latent", model.kv_lora_rank)]
    down = LinearSpec("attention.down", "latent down", model.hidden_size, (*latents, ("k_rope", shared)), fp8=False)
    q = (("q", heads * model.head_dim), ("q_rope", heads * shared))
    kv = (("k", heads * model.head_dim), ("v", heads * model.value_head_dim))
    queries = LinearSpec("attention.q_up", "q up", model.q_lora_rank or model.hidden_size, q)
    keys = LinearSpec("attention.kv_up", "kv up", model.kv_lora_rank, kv)
    parts = ColumnParallel((queries,)), ColumnParallel((keys,))
    core = LatentAttentionSpec(
        heads, heads, model.qk_head_dim, model.windows[layer], value_dim=model.value_head_dim, shared_key=shared
    )
    return LatentProjections(down, *parts, tuple(latents), heads, shared), core
