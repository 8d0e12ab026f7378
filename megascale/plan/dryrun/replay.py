"""Replay of module costs: of several equal modules one is run, and its costs are replayed for the rest.

`ModuleCostCache` measures a module's forward and backward, and the two parts of a split one, in separate
`ResourceCounts`. A `ReplayModule` replaces a module: the same communications, FLOPs, memory peak, and bytes saved for
backward are counted, without the operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megascale.layout.blocks import distinct_blocks
from megascale.layout.chunks import fp8_layers
from megascale.layout.recompute_policy import NO_RECOMPUTE, RecomputePolicy, recompute_policy
from megascale.ops.rope import layer_rope, rope_table
from megascale.parallel.activation_store import moved_tensors
from megascale.parallel.experts.dispatcher import ExpertChoice
from megascale.parallel.grad_accumulation import WeightGradients, leaving, left_for_w
from megascale.parallel.microbatch import MicroBatch
from megascale.plan.dryrun.resource_counter import (
    BytesByKind,
    CommCall,
    ResourceCounterMode,
    ResourceCounts,
    TrackedStorage,
)
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

    `saved_for_backward`: bytes live between forward and backward. `left`: bytes live between the parts of a split
    backward. `retained`: bytes live after the backward. None of them counts the input, which is saved for backward if
    `saves_input`, or the output's gradient; the second part holds these if `leaves` says so. `moved`: bytes saved for
    backward that move meanwhile, and are counted in none. `backward` is None without gradients, `weight_gradient`
    unless the backward is split. `choice`: of the micro-batch, if the forward has made one; it is counted neither.
    """

    shape: torch.Size
    dtype: torch.dtype
    forward: PassCost
    backward: PassCost | None
    weight_gradient: PassCost | None
    saved_for_backward: BytesByKind
    moved: int
    left: BytesByKind
    retained: BytesByKind
    saves_input: bool
    leaves: Sequence[bool]
    choice: ExpertChoice | None


@dataclass
class ModuleCostCache:
    """Measures modules and caches their `costs`.

    `split`: backwards are measured in their two parts. `representatives`: the module that is run for all modules of a
    key. Only the representative has the side effects of a first call, such as quantized weights. `choices`: by key,
    those of the last measured forward, for a recomputation.
    """

    counter_mode: ResourceCounterMode
    grad_dtype: torch.dtype
    split: bool = False
    costs: dict[Hashable, ModuleCost] = field(default_factory=dict)
    representatives: dict[Hashable, nn.Module] = field(default_factory=dict)
    choices: dict[Hashable, dict[int, ExpertChoice]] = field(default_factory=dict)

    @property
    def counts(self) -> ResourceCounts:
        return self.counter_mode.recorder.counts

    @contextmanager
    def apart(self, module: nn.Module) -> Iterator[None]:
        """Have counts of its own for what runs inside, and main gradients for parameters without them. A recomputation
        runs inside of an I, whose queue is not for what is measured.
        """
        recorder = self.counter_mode.recorder
        outer, recorder.counts = recorder.counts, ResourceCounts()
        trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
        without_grad = [parameter for parameter in trained if not hasattr(parameter, "main_grad")]
        for parameter in without_grad:
            parameter.main_grad = torch.empty(parameter.shape, dtype=self.grad_dtype)  # type: ignore[attr-defined]
        try:
            with leaving(module.parameters(), None) if self.split else nullcontext():
                yield
        finally:
            for parameter in without_grad:
                del parameter.main_grad  # type: ignore[attr-defined]
            recorder.counts = outer

    def measure(
        self, module: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor], choices: Mapping[int, ExpertChoice],
        policy: RecomputePolicy,
    ) -> ModuleCost:  # fmt: skip
        """Run `call` on a tensor like x, and the backward if gradients are enabled, `apart`. `choices`: the call may
        add one. `policy`: if the module is recomputed, checkpointing holds the output's gradient until the backward
        ends; if what it saves moves, this is counted apart.
        """
        with_backward, known, counts = torch.is_grad_enabled(), set(choices), self.counts
        leaf = torch.empty_like(x).requires_grad_(x.requires_grad and with_backward)
        baseline = Counter(counts.live_bytes)  # tensors that exist only for the measurement
        module_input = leaf.clone()
        storages, start = [self.counter_mode.storage(module_input)], self._start()  # of the input, and of the gradient
        moved, moves = dict[int, TrackedStorage](), policy.store != "device" and not policy.full
        with self._noting(moved, module_input, module) if moves else nullcontext():
            out = call(module_input)
        forward = self._cost(start)
        shape, dtype = out.shape, out.dtype
        backward, weight_gradient = None, None
        edge, starts, held_grads = None, [start], list[Tensor]()

        def on_backward_start(grad: Tensor) -> None:
            starts.append(self._start())
            storages.append(self.counter_mode.storage(grad))
            held_grads.extend([grad] if policy.full else [])

        if with_backward:
            edge = get_gradient_edge(_BackwardStart.apply(out, on_backward_start))
        del out, module_input
        choice = next((choices[layer] for layer in choices.keys() - known), None)
        baseline["activations"] += sum(tensor.nbytes for tensor in _tensors(choice))
        saved, (saves_input,) = self._held(baseline, storages)
        moving = sum(storage.nbytes for storage in moved.values() if storage.alive and storage is not storages[0])
        saved -= Counter({"activations": moving})
        left = WeightGradients()
        if edge is not None:
            with leaving(module.parameters(), left) if self.split else nullcontext():
                torch.autograd.backward((edge,), (torch.ones((), dtype=self.grad_dtype),))
            backward = self._cost(starts[-1])
            leaf.grad = None
        del edge
        held_grads.clear()
        waiting, leaves = self._held(baseline, storages)
        if backward is not None and self.split:
            start = self._start()
            left.run()
            weight_gradient = self._cost(start)
        retained, _ = self._held(baseline, storages)
        costs = forward, backward, weight_gradient
        return ModuleCost(shape, dtype, *costs, saved, moving, waiting, retained, saves_input, leaves, choice)

    def _noting(
        self, moved: dict[int, TrackedStorage], x: Tensor, module: nn.Module
    ) -> torch.autograd.graph.saved_tensors_hooks:
        """Note the memory of saved tensors that move, of a module with input x, where they stay in fact."""
        moves = moved_tensors(x, module.parameters())

        def note(tensor: Tensor) -> Tensor:
            storage = self.counter_mode.storage(tensor)
            if moves(tensor) and storage.counts is self.counts:  # not what layers share
                moved[id(storage)] = storage
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

    def _held(self, baseline: BytesByKind, storages: Sequence[TrackedStorage]) -> tuple[BytesByKind, Sequence[bool]]:
        """Return the live bytes beyond `baseline` and `storages`, and which of these are alive."""
        alive = [storage.alive for storage in storages]
        held = self.counts.live_bytes - baseline
        return held - Counter({"activations": sum(s.nbytes for s in storages if s.alive)}), alive

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

    `layer`: transformer layer in labels of communications; `policy`: what becomes of the module's activations.
    """

    def __init__(
        self,
        module: nn.Module,
        module_key: Hashable,
        layer: int,
        cost_cache: ModuleCostCache,
        anchor: Tensor,
        policy: RecomputePolicy,
    ) -> None:
        super().__init__()
        self._module = [module]  # in a list, so that the parameters are not registered here
        self._module_key = module_key
        self._layer = layer
        self._cost_cache = cost_cache
        self._anchor = anchor
        self._policy = policy
        self._called = set[bool]()  # with gradients enabled, without, or both

    def forward(self, x: Tensor, batch: MicroBatch, **named: Any) -> Tensor:
        with_gradients, cache = torch.is_grad_enabled(), self._cost_cache
        first = with_gradients not in self._called
        self._called.add(with_gradients)
        key = (self._module_key, first, tuple(named.items()), x.shape, x.requires_grad, with_gradients)
        if key not in cache.costs:
            module = cache.representatives.setdefault(self._module_key, self._module[0])
            again = self._policy.full and with_gradients
            choices = cache.choices[self._module_key] = cache.choices[self._module_key] if again else {}
            own = replace(batch, expert_choices=choices)
            with cache.apart(module), _weights_of(self._module[0], module):
                cost = cache.measure(module, x, lambda x: module(x, own, **named), choices, self._policy)
            cache.costs[key] = cost
        cost = cache.costs[key]
        if cost.choice is not None:
            batch.expert_choices[self._layer] = _without_values(cost.choice)
        return _Replay.apply(x, self._anchor, cache, cost, self._layer, [*self._module[0].parameters()])


@contextmanager
def _weights_of(owner: nn.Module, module: nn.Module) -> Iterator[None]:
    """Have the weights of `owner` in an equal `module`, whose own may not be gathered."""
    theirs, own = ([(p.data, getattr(p, "gathered", None)) for p in each.parameters()] for each in (owner, module))

    def take(weights: Sequence[tuple[Tensor, Any]]) -> None:
        for parameter, (data, gathered) in zip(module.parameters(), weights, strict=True):
            parameter.data, parameter.gathered = data, gathered  # type: ignore[attr-defined]

    take(theirs)
    yield
    take(own)


class _Replay(torch.autograd.Function):
    """Counts the forward and backward passes of `cost`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, cost_cache: ModuleCostCache, cost: ModuleCost, layer: int,
        parameters: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        ctx.cost_cache, ctx.cost, ctx.parameters = cost_cache, cost, parameters
        ctx.layer, ctx.input_meta = layer, (x.shape, x.dtype, x.requires_grad)
        _replay(cost_cache, cost.forward, layer)  # whose peak has what moves
        moved = [x.new_empty(cost.moved, dtype=torch.uint8)] if cost.moved else []
        ctx.save_for_backward(*([x] if cost.saves_input else []), *moved)
        for kind, nbytes in cost.saved_for_backward.items():
            cost_cache.counts.add_bytes(kind, nbytes)
        return torch.empty(cost.shape, dtype=cost.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cost_cache, cost, layer, left = ctx.cost_cache, ctx.cost, ctx.layer, left_for_w(*ctx.parameters)
        assert cost.backward is not None, "the module was measured with gradients"
        saved = ctx.saved_tensors  # what has moved comes back, and the block before it
        operands = *saved[: cost.saves_input], *grads
        _replay(cost_cache, cost.backward, layer)
        for moved in saved[cost.saves_input :]:
            cost_cache.counter_mode.drop(moved)
        _change(cost_cache.counts, cost.saved_for_backward, cost.left)
        held = [tensor for tensor, leaves in zip(operands, cost.leaves[-len(operands) :], strict=True) if leaves]

        def weight_gradient() -> None:
            if cost.weight_gradient is not None:
                _replay(cost_cache, cost.weight_gradient, layer)
            held.clear()
            _change(cost_cache.counts, cost.left, cost.retained)

        if left is None:
            weight_gradient()
        else:
            left.add(weight_gradient)
        shape, dtype, requires_grad = ctx.input_meta
        grad = torch.empty(shape, dtype=dtype, device=grads[0].device) if requires_grad else None
        return grad, None, None, None, None, None


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


def _change(counts: ResourceCounts, before: BytesByKind, after: BytesByKind) -> None:
    """Count bytes that are held after a pass in place of those before."""
    for kind in before | after:
        counts.add_bytes(kind, after[kind] - before[kind])


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


def replay_equal_modules(run: Run, cost_cache: ModuleCostCache) -> None:
    """Replace every module that a stage calls by a `ReplayModule`."""
    m, quantized = run.config.model, fp8_layers(run.config.model, run.config.train, run.config.fp8)
    if m.position == "rope":  # one table for all layers with equal angles
        wide = torch.promote_types(run.dtypes[0], torch.float32)
        sharding = run.train_loader.sharding
        spans = None if sharding is None or run.config.data.attention_mask == "document" else sharding.row.spans
        for rope in {layer_rope(m, layer) for layer in range(m.total_layers)}:
            rope_table(m.seq_length, rope, wide, run.device.torch_device, spans)
    anchor, kinds = torch.zeros((), requires_grad=True), distinct_blocks(m)[1]

    def replayed(
        module: nn.Module, key: Hashable, layer: int = -1, policy: RecomputePolicy = NO_RECOMPUTE
    ) -> ReplayModule:
        return ReplayModule(module, key, layer, cost_cache, anchor, policy)

    for stage in run.stages:
        for modules in (stage.layers, stage.predictions):
            for name, block in list(modules.items()):
                layer = int(name)
                policy = recompute_policy(run.config.train, layer)
                trained = tuple(parameter.requires_grad for parameter in block.parameters())
                key = (kinds[layer], layer in quantized, policy, trained)
                modules[name] = replayed(block, key, layer, policy)
        if stage.embedding is not None and stage.embedding.token is not None:
            stage.embedding = replayed(stage.embedding, "embedding")  # type: ignore[assignment]
        for after, head in list(stage.exits.items()):
            stage.exits[after] = replayed(head, "exit")
        if stage.head is not None and stage.ends_in_loss:
            norm, stage.head = stage.head.norm, replayed(stage.head, "head")  # type: ignore[assignment]
            stage.head.norm = norm  # type: ignore[union-attr]
