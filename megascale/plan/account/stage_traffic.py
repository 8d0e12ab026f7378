"""Communication of a pipeline stage's layers, embedding and head, and of its messages (`StageTraffic`).

The parts of a block list their collectives over tp, cp and ep (`layout.parts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from megascale.catalog.recipes import TENSOR
from megascale.config.run import RunConfig
from megascale.layout.blocks import BlockSpec, block_spec, frozen_names, is_skippable, tile_mlp
from megascale.layout.chunks import bucket_sizes, count_heads, fp8_layers, stages_of
from megascale.layout.freezing import matches
from megascale.layout.loss import loss_chunks
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes
from megascale.layout.pieces import split_rows
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.layout.stages import Stages
from megascale.layout.tensors import TOKEN_EMBEDDING, padded_vocab
from megascale.layout.topology import DATA_AXES
from megascale.plan.account.sizes import coded_elements, micro_batch_sizes


def block_traffic(sizes: MicroBatchSizes, block: BlockSpec, recompute: RecomputePolicy) -> list[CommOp]:
    """List a block's collectives over tp for a micro-batch, in order."""
    parts = tile_mlp(block, recompute.mlp_tiles, recompute.stored_tiles)
    sent = [each for part in parts for each in part.traffic(sizes)]
    if recompute.full:
        sent += [each for part in parts for each in part.recomputed_traffic(sizes, is_skippable(block, part))]
    elif recompute.attention:
        sent += [each for part in block if part.attends for each in part.traffic(sizes)]
    return sent + [each for part in reversed(parts) for each in part.traffic(sizes, backward=True)]


def context_traffic(sizes: MicroBatchSizes, block: BlockSpec, recompute: RecomputePolicy) -> Iterator[CommOp]:
    """List a block's communication over cp for a micro-batch: exchanges of attention, and amaxes in FP8."""
    for part in block:
        for backward in (False, False, True) if recompute.full else (False, True):
            yield from part.token_amaxes(sizes, backward)
        for backward in (False, False, True) if recompute.full or recompute.attention else (False, True):
            yield from part.context_traffic(sizes, backward)


def expert_traffic(sizes: MicroBatchSizes, block: BlockSpec, recompute: RecomputePolicy) -> Iterator[CommOp]:
    """List a block's exchanges of tokens over ep for a micro-batch."""
    for part in block:
        yield from part.expert_traffic(sizes)
        yield from part.expert_traffic(sizes, again=True) if recompute.full else ()
        yield from part.expert_traffic(sizes, backward=True)


@dataclass(frozen=True)
class StageTraffic:
    """The communication of the ranks of a pipeline stage in a step."""

    config: RunConfig
    stage: int

    @cached_property
    def sizes(self) -> MicroBatchSizes:
        return micro_batch_sizes(self.config)

    @cached_property
    def layout(self) -> Stages:
        return stages_of(self.config.model, self.config.parallel)

    def all(self) -> Iterator[CommOp]:
        """List all collectives and messages of a step: of blocks over tp, cp and ep, per micro-batch, and once for the
        amax of FP8 weights; of the ends, and between stages.
        """
        config, p, m = self.config, self.config.parallel, self.config.num_microbatches
        fp8 = fp8_layers(config.model, config.train, config.fp8)
        parts = 2 if config.overlap.tp == "domino" else 1  # of a micro-batch's sequences
        batch = self.sizes.batch // parts
        for chunk in range(p.vpp):
            layers = self.layout.layers(self.layout.index(self.stage, chunk))
            kinds = Counter(
                (
                    block_spec(config.model, layer),
                    frozen_names(config.model, layer, config.train.freeze),
                    layer in fp8,
                    f"layers.{layer}" in self._coded,
                    recompute_policy(config.train, layer),
                )
                for layer in layers
            )
            for (block, frozen, quantized, coded, recompute), count in kinds.items():
                sizes = replace(self.sizes, batch=batch, fp8=quantized, frozen=frozen)
                sent = list(context_traffic(sizes, block, recompute)) if p.cp > 1 else []
                sent += block_traffic(sizes, block, recompute) if p.tp > 1 else []
                sent += expert_traffic(sizes, block, recompute) if p.ep > 1 else []
                visits = self.layout.placement.visits(self.stage, chunk, m)
                yield from (each._replace(times=parts * count * visits) for each in sent)
                amaxes = self._weight_amaxes(block, recompute, visits, coded) if p.tp > 1 and quantized else ()
                yield from (each._replace(times=count * each.times) for each in amaxes)
        yield from (each._replace(times=m) for each in self._ends())
        for path, count in self.layout.placement.counted_paths(m).items():
            yield from (each._replace(times=count) for each in self._messages(path))

    @cached_property
    def _coded(self) -> set[str]:
        """The layers whose weights, but for experts, are gathered as codes."""
        c = self.config
        buckets = chain(*bucket_sizes(c.model, c.parallel, c.overlap, c.train, self.stage))
        dense = (bucket for bucket in buckets if bucket.reduce_axes == DATA_AXES and coded_elements(c, bucket))
        return {module for bucket in dense for module in bucket.modules}

    def _weight_amaxes(
        self, block: BlockSpec, recompute: RecomputePolicy, visits: int, coded: bool
    ) -> Iterator[CommOp]:
        """List the all-reduces of the amaxes of a block's FP8 weights: once a step; of sharded ones with every cast in
        which tp shards a scale's elements: all if it is the tensor's, for dgrad if tp shards rows, else for forwards.
        Of those gathered as codes they are casts for dgrad alone, where codes do not serve it.
        """
        sharded, weight = self.config.parallel.zero == 3, self.config.fp8.facts["weight"]
        for part in block if not (coded and weight.block.serves_transpose) else ():
            forwards = 2 if recompute.full and not is_skippable(block, part) else 1
            for param in (param for param in part.params("", self.config.model) if param.fp8):
                dimension = param.sharding["tp"]
                whole = param.parts[0].shape[1 - dimension]  # of the dimension that tp does not shard
                if coded and dimension == 1:
                    times = 0
                elif sharded and weight.amax_block == TENSOR:
                    times = visits * (forwards + 1)
                elif sharded and dimension == 1:
                    times = visits * forwards
                else:
                    times = visits if sharded else 1
                layer = param.name.removeprefix(".").removesuffix(".weight")
                for amaxes in replace(self.sizes, fp8=True).amaxes(layer, "weight", whole):
                    yield amaxes._replace(times=times)

    def _ends(self) -> Iterator[CommOp]:
        """List the collectives over tp of embedding and head for a micro-batch. The loss has chunks of tokens."""
        model, p, sizes = self.config.model, self.config.parallel, self.sizes
        columns = padded_vocab(model, p.tp) // p.tp
        width, local = model.hidden_size * sizes.compute, sizes.rows // sizes.parts
        whole = not p.vocab_pp  # embedding and head are in one stage
        frozen = matches(TOKEN_EMBEDDING, self.config.train.freeze)
        yield from () if whole else self._shared_vocabulary()
        for chunk in range(p.vpp if p.tp > 1 else 0):
            index = self.layout.index(self.stage, chunk)
            if index == 0 and whole:
                yield sizes.reduce("embedding", sizes.rows, width)
                yield from () if frozen else sizes.gather("embedding gradient", sizes.rows, width)
            chunks = split_rows(local, loss_chunks(local, sizes.rows * sizes.batch, columns))
            heads = count_heads(model, self.layout, index)
            taught = len(chunks) if index == self.layout.count - 1 and self.config.train.soft_tokens else 0
            for number, part in enumerate(chunks * heads):
                rows, sums = (part.stop - part.start) * sizes.parts, 3 if number < taught else 2
                yield from sizes.gather("head", rows, width, overlap=True)
                yield sizes.reduce("head gradient", rows, width)
                yield CommOp("tp", "all_reduce", rows * sizes.batch * sizes.wide, "logits max")
                yield CommOp("tp", "all_reduce", sums * rows * sizes.batch * sizes.wide, "softmax sums")

    def _shared_vocabulary(self) -> Iterator[CommOp]:
        """List the collectives of a micro-batch over tp and over the stages that share the vocabulary."""
        p, sizes = self.config.parallel, self.sizes
        width = self.config.model.hidden_size * sizes.compute
        if p.tp > 1:
            yield from (sizes.reduce(label, sizes.rows, width) for label in ("embedding", "hidden gradient"))
            frozen = matches(TOKEN_EMBEDDING, self.config.train.freeze)
            yield from () if frozen else sizes.gather("embedding gradient", sizes.rows, width)
            yield from sizes.gather("hidden", sizes.rows, width, overlap=True)
        sums = ("embedding", "embedding gradient", "hidden", "hidden gradient")
        yield from (CommOp("pp.pp", "all_reduce", sizes.stream, label) for label in sums)
        group = "pp.tp+pp" if p.tp > 1 else "pp.pp"
        yield CommOp(group, "all_gather", 3 * p.tp * p.pp * sizes.tokens * sizes.wide, "head statistics")

    def _messages(self, path: Sequence[int]) -> Iterator[CommOp]:
        """List the messages of a micro-batch between the stages of its path: up to a higher pipeline rank, down to a
        lower one. Ranks of tp send shares, which receivers gather unless sp shards activations.
        """
        p, size, places = self.config.parallel, self.sizes.message, [self.layout.placement.places[at] for at in path]
        for index in (index for index, (rank, _) in enumerate(places) if rank == self.stage):
            for rank, _ in (*places[max(0, index - 1) : index], *places[index + 1 : index + 2]):
                there, back = ("pp.up", "pp.down") if rank > self.stage else ("pp.down", "pp.up")
                if rank != self.stage:
                    yield CommOp(there, "send", size, "boundary")
                    yield CommOp(back, "receive", size, "boundary")
                if rank != self.stage and p.tp > 1 and not p.sp:
                    yield CommOp("tp", "all_gather", size * p.tp, "boundary")
