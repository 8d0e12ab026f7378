"""Replay of module costs: of several equal modules one is run, and its costs are replayed for the rest.

`ModuleCostCache` measures a module's forward and backward in separate `ResourceCounts`. A `ReplayModule` replaces a
module: the same communications, FLOPs, memory peak, and bytes saved for backward are counted, without the operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megascale.layout.blocks import distinct_blocks
from megascale.layout.chunks import fp8_layers
from megascale.layout.recompute_policy import recompute_policy
from megascale.layout.sequence_shard import sequence_shard
from megascale.ops.rope import layer_rope, rope_table
from megascale.parallel.experts.expert_choice import ExpertChoice
from megascale.parallel.microbatch import MicroBatch
from megascale.plan.dryrun.resource_counter import BytesByKind, CommCall, ResourceCounterMode, ResourceCounts
from megascale.train.run import Run


@dataclass(frozen=True)
class PassCost:
    """The cost of a forward or a backward pass. `peak_increase`: bytes by kind at the peak, less those at the start."""

    peak_increase: BytesByKind
    flops: Counter[str]
    calls: list[CommCall]


@dataclass(frozen=True)
class ModuleCost:
    """The cost of a module whose output has `shape` and `dtype`.

    `saved_for_backward`: bytes live between forward and backward. `retained`: bytes live after the backward. Neither
    counts the input, which is saved for backward if `saves_input`. `backward` is None without gradients. `choice`: of
    the micro-batch, if the forward has made one; it is counted neither.
    """

    shape: torch.Size
    dtype: torch.dtype
    forward: PassCost
    backward: PassCost | None
    saved_for_backward: BytesByKind
    retained: BytesByKind
    saves_input: bool
    choice: ExpertChoice | None


@dataclass
class ModuleCostCache:
    """Measures modules and caches their `costs`.

    `representatives`: the module that is run for all modules of a key. Only the representative has the side effects of
    a first call, such as quantized weights. `choices`: by key, those of the last measured forward, for a recomputation.
    """

    counter_mode: ResourceCounterMode
    grad_dtype: torch.dtype
    costs: dict[Hashable, ModuleCost] = field(default_factory=dict)
    representatives: dict[Hashable, nn.Module] = field(default_factory=dict)
    choices: dict[Hashable, dict[int, ExpertChoice]] = field(default_factory=dict)

    @property
    def counts(self) -> ResourceCounts:
        return self.counter_mode.recorder.counts

    def measure(
        self,
        module: nn.Module,
        x: Tensor,
        call: Callable[[Tensor], Tensor],
        choices: Mapping[int, ExpertChoice],
        recompute: bool = False,
    ) -> ModuleCost:
        """Run `call` on a tensor like x, and the backward if gradients are enabled. `choices`: the call may add one.
        `recompute`: the module's activations are recomputed, and checkpointing holds the output's gradient until
        the backward ends.
        """
        recorder = self.counter_mode.recorder
        outer, recorder.counts = recorder.counts, ResourceCounts()
        try:
            with _temporary_main_grads(module, self.grad_dtype):
                return self._measure(x, call, choices, recompute)
        finally:
            recorder.counts = outer

    def _measure(
        self, x: Tensor, call: Callable[[Tensor], Tensor], choices: Mapping[int, ExpertChoice], recompute: bool
    ) -> ModuleCost:
        with_backward, known = torch.is_grad_enabled(), set(choices)
        counts, counter_mode = self.counts, self.counter_mode
        leaf = torch.empty_like(x).requires_grad_(x.requires_grad and with_backward)
        baseline = Counter(counts.live_bytes)  # tensors that exist only for the measurement
        module_input = leaf.clone()
        key, start = counter_mode.storage_key(module_input), self._start()
        out = call(module_input)
        forward = self._cost(start)
        shape, dtype = out.shape, out.dtype
        backward: PassCost | None = None
        edge, starts, held_grads = None, [start], list[Tensor]()

        def on_backward_start(grad: Tensor) -> None:
            starts.append(self._start())
            held_grads.extend([grad] if recompute else [])

        if with_backward:
            edge = get_gradient_edge(_BackwardStart.apply(out, on_backward_start))
        del out, module_input
        saves_input = counter_mode.is_alive(key)
        saved = counts.live_bytes - baseline
        if saves_input:
            saved -= Counter({"activations": x.nbytes})
        choice = next((choices[layer] for layer in choices.keys() - known), None)
        kept = Counter({"activations": sum(tensor.nbytes for tensor in _tensors(choice))})
        if edge is not None:
            torch.autograd.backward((edge,), (torch.ones((), dtype=self.grad_dtype),))
            backward = self._cost(starts[-1])
            leaf.grad = None
        del edge
        held_grads.clear()
        retained = counts.live_bytes - baseline - kept
        return ModuleCost(shape, dtype, forward, backward, saved - kept, retained, saves_input, choice)

    def _start(self) -> BytesByKind:
        """Begin to count a forward or backward pass. Returns the live bytes."""
        counts = self.counts
        counts.peak, counts.at_peak = counts.total, Counter(counts.live_bytes)
        counts.flops, counts.calls = Counter(), []
        return Counter(counts.live_bytes)

    def _cost(self, start: BytesByKind) -> PassCost:
        """Return the cost of the pass that began with `start` live bytes."""
        counts, peak_increase = self.counts, Counter(self.counts.at_peak)
        peak_increase.subtract(start)
        return PassCost(peak_increase, counts.flops, counts.calls)


class ReplayModule(nn.Module):
    """A module that replays the costs of `module`.

    Modules of one `module_key` have equal costs, except in a first call: the forward quantizes weights, and the
    backward writes the main gradients, to which later backwards add. With activation recomputation a module is called
    without gradients and later with gradients, and both have a first call.

    `layer`: transformer layer in labels of communications; `recompute`: the module's activations are recomputed.
    """

    def __init__(
        self,
        module: nn.Module,
        module_key: Hashable,
        layer: int,
        cost_cache: ModuleCostCache,
        anchor: Tensor,
        recompute: bool,
    ) -> None:
        super().__init__()
        self._module = [module]  # in a list, so that the parameters are not registered here
        self._module_key = module_key
        self._layer = layer
        self._cost_cache = cost_cache
        self._anchor = anchor
        self._recompute = recompute
        self._called = set[bool]()  # with gradients enabled, without, or both

    def forward(self, x: Tensor, batch: MicroBatch, **named: Any) -> Tensor:
        with_gradients, cache = torch.is_grad_enabled(), self._cost_cache
        first = with_gradients not in self._called
        self._called.add(with_gradients)
        key = (self._module_key, first, tuple(named.items()), x.shape, x.requires_grad, with_gradients)
        if key not in cache.costs:
            module = cache.representatives.setdefault(self._module_key, self._module[0])
            again = self._recompute and with_gradients
            choices = cache.choices[self._module_key] = cache.choices[self._module_key] if again else {}
            own = replace(batch, expert_choices=choices)
            cache.costs[key] = cache.measure(module, x, lambda x: module(x, own, **named), choices, self._recompute)
        cost = cache.costs[key]
        if cost.choice is not None:
            batch.expert_choices[self._layer] = _without_values(cost.choice)
        return _Replay.apply(x, self._anchor, cache, cost, self._layer)


class _Replay(torch.autograd.Function):
    """Counts the forward and backward passes of `cost`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, cost_cache: ModuleCostCache, cost: ModuleCost, layer: int
    ) -> Tensor:
        ctx.cost_cache, ctx.cost = cost_cache, cost
        ctx.layer, ctx.input_meta = layer, (x.shape, x.dtype, x.requires_grad)
        if cost.saves_input:
            ctx.save_for_backward(x)
        _replay(cost_cache, cost.forward, layer)
        for kind, nbytes in cost.saved_for_backward.items():
            cost_cache.counts.add_bytes(kind, nbytes)
        return torch.empty(cost.shape, dtype=cost.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cost_cache, cost = ctx.cost_cache, ctx.cost
        assert cost.backward is not None, "the module was measured with gradients"
        _replay(cost_cache, cost.backward, ctx.layer)
        for kind, nbytes in (cost.saved_for_backward - cost.retained).items():
            cost_cache.counts.add_bytes(kind, -nbytes)
        shape, dtype, requires_grad = ctx.input_meta
        grad = torch.empty(shape, dtype=dtype, device=grads[0].device) if requires_grad else None
        return grad, None, None, None, None


class _BackwardStart(torch.autograd.Function):
    """Maps a tensor to a scalar; in the backward, creates the tensor's gradient and passes it to `on_start`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_start: Callable[[Tensor], object]) -> Tensor:
        ctx.meta, ctx.on_start = (x.shape, x.dtype, x.device), on_start
        return torch.empty((), device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shape, dtype, device = ctx.meta
        grad = torch.empty(shape, dtype=dtype, device=device)
        ctx.on_start(grad)
        return grad, None


def _replay(cost_cache: ModuleCostCache, cost: PassCost, layer: int) -> None:
    """Count a measured pass. `layer` replaces the representative's layer in labels of communications."""
    recorder = cost_cache.counter_mode.recorder
    recorder.counts.add_transient(cost.peak_increase)
    recorder.counts.flops.update(cost.flops)
    for call in cost.calls:
        axis, label = call.group.partition(".")[0], call.label
        if label.layer >= 0:
            label = label._replace(layer=layer)
        recorder.record_communication(axis, call.group, call.operation, label, call.bytes, call.peer)


def _tensors(choice: ExpertChoice | None) -> list[Tensor]:
    """List the tensors of a choice."""
    if choice is None:
        return []
    values = [choice.experts, choice.counts]
    for dispatcher in choice.dispatchers:
        values += [dispatcher.groups.ends, *vars(dispatcher).values()]
    return [value for value in values if isinstance(value, Tensor)]


def _without_values(choice: ExpertChoice) -> ExpertChoice:
    """Return a choice with as many bytes, and the counts in their place."""
    counts = torch.empty_like(choice.counts)
    nbytes = sum(tensor.nbytes for tensor in _tensors(choice)) - counts.nbytes
    return ExpertChoice(torch.empty(nbytes, dtype=torch.uint8), (), counts)


@contextmanager
def _temporary_main_grads(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Allocate main gradients for parameters without them while the block runs."""
    without_grad = [p for p in module.parameters() if not hasattr(p, "main_grad")]
    for parameter in without_grad:
        parameter.main_grad = torch.empty(parameter.shape, dtype=dtype)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in without_grad:
            del parameter.main_grad  # type: ignore[attr-defined]


def replay_equal_modules(run: Run, cost_cache: ModuleCostCache) -> None:
    """Replace every module that a stage calls by a `ReplayModule`."""
    m, quantized = run.config.model, fp8_layers(run.config.model, run.config.train, run.config.fp8)
    if m.position == "rope":  # one table for all layers with equal angles
        wide = torch.promote_types(run.dtypes[0], torch.float32)
        shard = sequence_shard(run.config.parallel, m.seq_length, run.mesh.coord.cp)
        spans = None if shard is None or run.config.data.attention_mask == "document" else shard.spans
        for rope in {layer_rope(m, layer) for layer in range(m.total_layers)}:
            rope_table(m.seq_length, rope, wide, run.device.torch_device, spans)
    anchor, kinds = torch.zeros((), requires_grad=True), distinct_blocks(m)[1]

    def replayed(module: nn.Module, key: Hashable, layer: int = -1, recompute: bool = False) -> ReplayModule:
        return ReplayModule(module, key, layer, cost_cache, anchor, recompute)

    for chunk, stage in enumerate(run.stages):
        policy = recompute_policy(run.config.train, chunk)
        for modules in (stage.layers, stage.predictions):
            for name, block in list(modules.items()):
                layer = int(name)
                key = (kinds[layer], layer in quantized, policy)
                modules[name] = replayed(block, key, layer, policy.full)
        if stage.embedding is not None and stage.embedding.token is not None:
            stage.embedding = replayed(stage.embedding, "embedding")  # type: ignore[assignment]
        if stage.head is not None and stage.ends_in_loss:
            norm, stage.head = stage.head.norm, replayed(stage.head, "head")  # type: ignore[assignment]
            stage.head.norm = norm  # type: ignore[union-attr]
