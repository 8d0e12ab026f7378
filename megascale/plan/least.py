"""What a layout takes at least, of time and of memory, found sooner than what it does take.

The time of a pipeline is at least that of three ways through its step, whatever the order of its ranks' actions. A rank
works on all its micro-batches, between the first's way to it and the last's way back: all of an ideal pipeline. One
micro-batch goes all the way, and at some stage waits for all others: more, where they are few. And gradients are
reduced one after another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.chunks import eight_bit_layers
from megascale.layout.recompute import recompute_of
from megascale.plan.activations import Sizes
from megascale.plan.estimate import Model, Skeleton
from megascale.plan.layouts import Layout, Space
from megascale.plan.links import group_route
from megascale.plan.memory import state_bytes
from megascale.plan.peak import token_bytes
from megascale.plan.profiles import Hardware, Hides, Stack
from megascale.plan.simulate import Times
from megascale.plan.working import block_backward


def least_time(times: Times, p: int, v: int, m: int, hides: Hides, *, reduce_each: bool = False) -> float:
    """Seconds of a step of p ranks with v chunks each and m micro-batches: `simulate.replay` of any schedule says as
    much or more. `reduce_each`: gradients are reduced after each backward.
    """
    hop = times.message + times.hops if p > 1 else 0.0
    sent = 0.0 if hides.pp else times.message  # in the load of its sender
    start = end = longest = 0.0  # when a rank has what its first forward needs; what is left when its load is done
    for rank in range(p):
        gradients, inner = _gradients(times, rank, v, m if reduce_each else 1, hides), rank > 1
        arrives = back = 0.0
        if rank:  # the first rank has no hop before, and sends no gradients
            arrives = start + times.forward[rank - 1, 0] + (hop if inner else times.message)
            back = hop - sent + times.backward[rank - 1, 0] + (sent if inner else 0.0) + end
        start, end = max(arrives, _gathered(times, rank, v, hides)), max(back, gradients.after)
        if rank == 0:
            begun, ended = start, end
        load = m * _load(times, rank, p, v, hides) + gradients.within
        longest = max(longest, start + load + end, start + times.forward[rank, 0] + gradients.all)
    forward, backward = times.forward.values(), times.backward.values()
    whole = sum(forward) + sum(backward) + 2 * (p * v - 1) * hop
    return max(longest, begun + whole + (m - 1) * max(*forward, *backward) + ended)


class _Gradients(NamedTuple):
    """Seconds of a rank's reductions: `all` of them; `within`: what its compute takes longer by before its last
    backward, which is of its first chunk; `after`: what is left when that is done.
    """

    all: float
    within: float
    after: float


def _gradients(times: Times, rank: int, v: int, repeats: int, hides: Hides) -> _Gradients:
    took = [times.reduce.get((rank, chunk), 0.0) for chunk in range(v)]
    if not hides.dp:
        return _Gradients(0.0, 0.0, sum(took) * repeats)
    hidden = [1 - 1 / times.buckets.get((rank, chunk), 1) for chunk in range(v)]
    drags = [seconds * part * times.drag for seconds, part in zip(took, hidden, strict=True)]
    after = max(took[0] * (1 - hidden[0]), took[0] - times.backward[rank, 0] * hidden[0], drags[0])
    return _Gradients(sum(took) * repeats, sum(drags) * repeats - drags[0], after)


def _gathered(times: Times, rank: int, v: int, hides: Hides) -> float:
    """When the weights are there that a rank's first forward needs, which is of its first chunk."""
    took = [times.gather.get((rank, chunk), 0.0) for chunk in range(v)]
    if not hides.dp:
        return sum(took)
    hidden = 1 - 1 / times.buckets.get((rank, 0), 1)
    return took[0] - min(took[0], times.forward[rank, 0]) * hidden


def _load(times: Times, rank: int, p: int, v: int, hides: Hides) -> float:
    """Of one micro-batch on a rank, with what of its messages nothing hides."""
    ends = (rank == 0) + (rank == p - 1)  # one message less each way
    messages = 2 * v - ends if p > 1 else 0
    exposed = times.hops + (0.0 if hides.pp else times.message)
    return sum(times.forward[rank, c] + times.backward[rank, c] for c in range(v)) + messages * exposed


class _State(NamedTuple):
    """Bytes, all on one rank."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0

    def sharded(self, shards: int, zero: int) -> float:
        """On each of so many ranks with a stage of ZeRO."""
        weights = self.weights / (shards if zero > 2 else 1)
        return weights + self.gradients / (shards if zero > 1 else 1) + self.optimizer / (shards if zero else 1)


class Floors:
    """Below what any layout of a space takes, in a few operations. What layouts share is found once: seconds of the
    network and of its least block by tp, sp, micro and recompute; bytes of a block's state by tp, and of what it keeps.
    """

    def __init__(self, space: Space, hardware: Hardware, stack: Stack) -> None:
        self._space, self._hardware, self._stack = space, hardware, stack
        self._chunks = space.config.parallel.layers_per_chunk
        self._piles = space.piles
        self._seconds: dict[Layout, tuple[float, float]] = {}
        self._memory: dict[Layout, float] = {}
        self._kept: dict[Layout, tuple[int, int, int]] = {}
        self._state: dict[int, tuple[_State, _State]] = {}

    def step_s(self, layout: Layout) -> float:
        """Seconds of a step: the mean rank's work; that of one with most layers; an ideal pipeline of the least chunks;
        one micro-batch's way.
        """
        m, p, v = self._micro_batches(layout), layout.pp, layout.vpp
        whole, block = self._block_seconds(layout)
        chunk = self._layers(layout)[1] * block
        way = whole + (m - 1) * chunk / 2  # of a forward and its backward, the longer
        most = math.ceil(self._space.config.model.num_layers / p) * block
        return max(m * whole / p, m * most, (p - 1 + m * v) * chunk, way) + self._stack.attained.step_s

    def likely_s(self, layout: Layout) -> float:
        """About what a step takes, no bound: where weights are sharded, no less than what moves them and gradients."""
        least, stack, dp = self.step_s(layout), self._stack, layout.dp
        if not stack.shards_weights or dp == 1:
            return least
        together = layout.tp * self._space.config.parallel.cp
        route = group_route(self._hardware, dp, together, self._space.devices, together=together)
        block, layers = self._state_of(layout.tp)[0], self._space.config.model.num_layers / layout.pp
        gathers = 3 if stack.gathers_again and layout.recompute == "full" else 2
        moved = layers * (gathers * block.weights + block.gradients)
        travel = gathers * route.collective("all_gather", layers * block.weights, dp)
        travel += route.collective("reduce_scatter", layers * block.gradients, dp)
        longer = max(travel, moved / stack.gather_rate) if stack.gather_rate else travel
        return max(least, self._micro_batches(layout) * longer)

    def memory(self, layout: Layout) -> float:
        """Bytes of the first rank. It has the step's tokens. All its chunks' activations are alive for as many
        micro-batches as there are stages, for the first gradients come back after p forwards and p backwards, or for
        all where they pile up; then a block's backward begins.
        """
        key = layout._replace(vpp=layout.vpp if self._chunks else 1, schedule="")
        if key not in self._memory:
            self._memory[key] = self._first_rank(layout)
        return self._memory[key]

    def _first_rank(self, layout: Layout) -> float:
        layers, _ = self._layers(layout)
        kept, working, tokens = self._block_bytes(layout)
        block, first = self._state_of(layout.tp)
        shards = layout.dp * self._space.config.parallel.cp
        zero = 3 if self._stack.shards_weights else layout.zero
        state = layers * block.sharded(shards, zero) + first.sharded(shards, zero)
        whole = self._whole(layers, block, first) if self._stack.shards_weights else 0.0
        count = self._micro_batches(layout)
        alive = count if self._piles else min(count, layout.pp)
        return state + whole + count * tokens + layers * alive * kept + working

    @staticmethod
    def _whole(layers: int, block: _State, first: _State) -> float:
        """Where weights are sharded: two units of the first rank, and the gradient of one."""
        one, two, *_ = sorted([block, block if layers > 1 else _State(), first], reverse=True)
        return one.weights + two.weights + one.gradients

    def _micro_batches(self, layout: Layout) -> int:
        return self._space.config.batch.total // (layout.dp * layout.micro)

    def _layers(self, layout: Layout) -> tuple[int, int]:
        """Of the first rank, and of the smallest chunk."""
        if self._chunks and len(self._chunks) == layout.pp * layout.vpp:
            return sum(self._chunks[:: layout.pp]), min(self._chunks)
        layers = self._space.config.model.num_layers
        return layers // layout.pp, layers // (layout.pp * layout.vpp)

    def _config(self, **keys: object) -> RunConfig:
        """With a layer in each chunk, of which all do the same."""
        found = self._space.applied(Layout(**{"dp": 1, **keys}))  # type: ignore[arg-type]
        parallel = found.parallel.model_copy(update={"layers_per_chunk": None})
        train = found.train.model_copy(update={"recompute_chunks": None})
        return found.model_copy(update={"parallel": parallel, "train": train})

    def _block_seconds(self, layout: Layout) -> tuple[float, float]:
        own = self._space.config
        recompute = "none" if own.train.recompute_chunks else layout.recompute
        key = Layout(tp=layout.tp, sp=layout.sp, micro=layout.micro, recompute=recompute)
        if key not in self._seconds:
            layers, dp = own.model.num_layers, self._space.devices // (layout.tp * own.parallel.cp)
            config = self._config(**{**key._asdict(), "vpp": layers, "dp": dp})
            model = Model(
                config, self._hardware, self._stack, Skeleton({(0, c): [] for c in range(layers)}, layers, [])
            )
            pairs = [pair.forward.total + pair.backward.total for pair in model.pairs.values()]
            self._seconds[key] = sum(pairs), min(pairs)
        return self._seconds[key]

    def _block_bytes(self, layout: Layout) -> tuple[int, int, int]:
        """What a block keeps of a micro-batch, the most that is there beside while its backward runs, and tokens."""
        key = Layout(tp=layout.tp, sp=layout.sp, micro=layout.micro, recompute=layout.recompute)
        if key not in self._kept:
            config = self._config(**key._asdict())
            sizes, windows, recompute = Sizes(config), config.model.windows, recompute_of(config.train, 0)
            cast = eight_bit_layers(config)
            some = {(window, layer in cast): layer for layer, window in enumerate(windows)}.values()
            kept = min(sizes.block(layer).kept(recompute) for layer in some)
            working = min(block_backward(config, layer, recompute) for layer in some)
            self._kept[key] = kept, sizes.residual + working, token_bytes(sizes)
        return self._kept[key]

    def _state_of(self, tp: int) -> tuple[_State, _State]:
        """Of a block, and of what the first rank has beside its blocks: weights, without what is cast, gradients and
        optimizer.
        """
        if tp not in self._state:
            config = self._config(tp=tp, pp=3, zero=0)
            model = config.model.model_copy(update={"num_layers": 3})  # of which one is alone on its rank
            config, facts = config.model_copy(update={"model": model}), PRECISIONS[config.train.precision].facts
            share = facts["compute_bytes"] / facts["accumulate_bytes"]
            found = [state_bytes(config, rank) for rank in (0, 1)]
            begin, block = (_State(each.gradients * share, each.gradients, each.optimizer) for each in found)
            self._state[tp] = block, _State(*(all - one for all, one in zip(begin, block, strict=True)))
        return self._state[tp]
