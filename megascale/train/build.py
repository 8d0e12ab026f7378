"""Construction of a run from a configuration: mesh, buffers, stages, optimizer, pipeline, loaders, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch

from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.schedules import SCHEDULES
from megascale.checkpoint.checkpoints import Checkpoints
from megascale.checkpoint.format.state import Progress
from megascale.comm import symmetric_memory
from megascale.comm.group import Group, single_rank_group
from megascale.comm.mesh import Mesh, open_mesh
from megascale.comm.warm_up import warm_up
from megascale.config.batch_rampup import batch_sizes
from megascale.config.run import RunConfig
from megascale.config.train import OptimizerConfig, TrainConfig
from megascale.core.rank import Rank
from megascale.data.mix.loader import Loader
from megascale.device import Device, profiler_range
from megascale.layout.chunks import chunk_buckets, fp8_layers, stages_of
from megascale.layout.param_groups import ParamGroups
from megascale.layout.recompute_policy import recompute_policy
from megascale.layout.topology import topology_of
from megascale.model.initialize import init_parameters
from megascale.model.modules import LayerContext, LayerOps
from megascale.model.transformer import Stage
from megascale.ops import select
from megascale.ops.select import OpContext
from megascale.ops.wgrad import Wgrad
from megascale.optim.lr import learning_rate, learning_rate_by_samples
from megascale.optim.sharded import ShardedOptimizer
from megascale.parallel.fp8_linear import Fp8State, build_linear_gemms
from megascale.parallel.param_and_grad_buffers import Overlap, ParamAndGradBuffers
from megascale.parallel.pipeline import P2PActivationSpec, PipelineExecutor
from megascale.parallel.stateful import Stateful
from megascale.parallel.tp_overlap import TensorParallel
from megascale.record.log import RankLog
from megascale.record.recorder import Recorder
from megascale.schedule.ir import RankSchedule, build_schedule, forwards_only
from megascale.schedule.lower import lower
from megascale.train.build_loaders import build_loaders
from megascale.train.op_context import op_context
from megascale.train.run import Dtypes, Run
from megascale.train.step_hooks import build_step_hooks
from megascale.train.stop import StopRequest

if TYPE_CHECKING:
    from megascale.optim.step_guard import StepGuard
    from megascale.parallel.context_parallel import ContextParallel
    from megascale.parallel.input_offload import ActivationOffload
    from megascale.train.noise_scale import NoiseScale
    from megascale.train.policy_state import PolicyState
    from megascale.train.weight_average import WeightAverage

KEPT_ORDERS = 32
"""Orders of actions that are kept; steps have a few numbers of micro-batches."""


def build_mesh(
    config: RunConfig,
    rank: Rank,
    device: Device,
    log: RankLog | None = None,
) -> Mesh:
    """Open and warm up this rank's process groups. Requires `comm.init.init_distributed`. `log`: this
    rank's.
    """
    placement = stages_of(config.model, config.parallel).placement
    recorder = Recorder(device.timer(), log, enabled=config.observe.record, named_range=profiler_range)
    mesh = open_mesh(
        topology_of(config.parallel),
        rank.rank,
        tied=config.model.tie_embeddings,
        placement=placement,
        recorder=recorder,
        launch=config.launch,
        nccl=config.nccl,
    )
    recorder.log.start_parts.begin("warm-up")
    warm_up(mesh, device, placement.links)
    return mesh


def build_rank_run(
    config: RunConfig, mesh: Mesh, device: Device, stop: StopRequest, *, init_weights: bool = True
) -> Run:
    """Build this rank's part of a run from a resolved configuration and a mesh of the same layout.

    `init_weights`: draw the initial weights; otherwise they are zero.
    """
    dtypes = run_dtypes(config)
    tp = build_tensor_parallel(config, mesh.tp, device)
    context = op_context(config, device)
    buffers = build_buffers(config, mesh, dtypes, device.torch_device, select.build_op("wgrad", context))
    if init_weights:
        initialize_weights(buffers, mesh, device, config.train.seed)
    kernels, quantized = select.build_op("linear", context), fp8_layers(config.model, config.train, config.fp8)
    fp8_state = Fp8State(config.model, config.fp8, quantized, mesh, device.torch_device, kernels)
    offload = build_offload(config.train, device)
    stages = build_stages(config, mesh, buffers, tp, LayerOps.from_context(context), fp8_state, offload)
    optimizer, guard = build_optimizer(config.optimizer, mesh, buffers, context, device.torch_device)
    mesh.recorder.log.start_parts.begin("indices")
    noise_scale = build_noise_scale(config, mesh, buffers, device.torch_device)
    average = build_average(config.train, optimizer, mesh)
    train, valid, valid_batches = build_loaders(config, mesh, device)
    pipeline = build_pipeline(config, mesh, stages, buffers, dtypes, device.torch_device, offload)
    policy = build_policy(config, mesh, pipeline, train, device.torch_device)
    parts: list[Stateful | None] = [optimizer, fp8_state, guard, noise_scale, average, policy]
    order_of = lru_cache(KEPT_ORDERS)(partial(build_order, config, mesh.coord.pp))
    mesh.recorder.log.start_parts.begin("build")
    return Run(
        config=config,
        device=device,
        mesh=mesh,
        dtypes=dtypes,
        stages=stages,
        buffers=buffers,
        fp8_state=fp8_state,
        noise_scale=noise_scale,
        policy=policy,
        average=average,
        optimizer=optimizer,
        pipeline=pipeline,
        order_of=order_of,
        train_loader=train,
        valid_loader=valid,
        valid_batches=valid_batches,
        lr=build_learning_rate(config),
        checkpoints=build_checkpoints(config, mesh, parts, device),
        progress=Progress(),
        stop=stop,
        step_hooks=build_step_hooks(config, noise_scale),
    )


def build_checkpoints(config: RunConfig, mesh: Mesh, parts: Sequence[Stateful | None], device: Device) -> Checkpoints:
    """Build what saves and resumes the state of `parts`; None: the run is without it."""
    saved = config.model_dump(by_alias=True, mode="json")
    folders, present = (config.folder, config.checkpoint_folder), [part for part in parts if part is not None]
    return Checkpoints(config.checkpoint, config.model, saved, *folders, mesh, present, device)


def build_tensor_parallel(config: RunConfig, group: Group, device: Device) -> TensorParallel:
    """Return the tensor parallelism of this rank, whose peers' memory is mapped where communication overlaps."""
    maps_peers = config.overlap.tp and symmetric_memory.can_map_peers(group, device)
    return TensorParallel(group, config.parallel.sp, config.overlap.tp, maps_peers, gpu=not device.is_cpu)


def build_optimizer(
    settings: OptimizerConfig, mesh: Mesh, buffers: ParamAndGradBuffers, context: OpContext, device: torch.device
) -> tuple[ShardedOptimizer, StepGuard | None]:
    """Build the optimizer over this rank's shards, and the guard of its steps, if there is one."""
    names = ParamGroups(settings).rules
    update_rules = {name: select.build_op("optimizer", replace(context, optimizer=name)) for name in names}
    guard = None
    if settings.zclip or settings.skip_sigma > 0:
        from megascale.optim.step_guard import StepGuard

        guard = StepGuard(settings, mesh, device)
    return ShardedOptimizer(buffers.buckets, mesh, settings, update_rules, guard), guard


def build_noise_scale(
    config: RunConfig, mesh: Mesh, buffers: ParamAndGradBuffers, device: torch.device
) -> NoiseScale | None:
    """Build what measures the gradient noise scale, with `train.noise_scale_every`."""
    if not config.train.noise_scale_every:
        return None
    from megascale.optim.first_gradient import FirstGradient
    from megascale.train.noise_scale import NoiseScale

    gradient = FirstGradient(buffers.buckets, mesh, sequence=config.parallel.sp)
    return NoiseScale(config.train, gradient, mesh, device)


def build_offload(settings: TrainConfig, device: Device) -> ActivationOffload | None:
    """Build the offload of block inputs, with `train.activation_offload`."""
    if not settings.activation_offload:
        return None
    from megascale.parallel.input_offload import ActivationOffload

    return ActivationOffload(device.host_buffers())


def build_average(settings: TrainConfig, optimizer: ShardedOptimizer, mesh: Mesh) -> WeightAverage | None:
    """Build the average of the weights, with `train.average`."""
    if settings.average == "none":
        return None
    from megascale.train.weight_average import WeightAverage

    return WeightAverage(settings, optimizer.shards, mesh)


def build_policy(
    config: RunConfig, mesh: Mesh, pipeline: PipelineExecutor, loader: Loader, device: torch.device
) -> PolicyState | None:
    """Build the state of the data policy, with `data.policy`."""
    if config.data.policy is None:
        return None
    from megascale.train.policy_state import PolicyState

    return PolicyState(config, mesh, pipeline, loader, device)


def build_learning_rate(config: RunConfig) -> Callable[[int], float]:
    """Return the learning rate as a function of the step."""
    if config.batch.rampup is None:
        return learning_rate(config.optimizer, config.train.steps)
    return learning_rate_by_samples(config.optimizer, config.train.steps, batch_sizes(config.batch))


def run_dtypes(config: RunConfig) -> Dtypes:
    """The compute and accumulation dtypes of `train.precision`."""
    facts = PRECISIONS[config.train.precision].facts
    return getattr(torch, facts["compute_dtype"]), getattr(torch, facts["accumulate_dtype"])


def build_buffers(
    config: RunConfig, mesh: Mesh, dtypes: Dtypes, device: torch.device, wgrad: Wgrad
) -> ParamAndGradBuffers:
    """Allocate this rank's weights and main gradients. `wgrad`: the GEMM that accumulates into the gradients."""
    # without tying, an embedding that is alone in a chunk must not be reduced between first and last stage
    untied = replace(mesh, tied=single_rank_group("tied"))
    return ParamAndGradBuffers(
        chunk_buckets(config.model, config.parallel, config.overlap, config.train, mesh.coord.pp),
        mesh if config.model.tie_embeddings else untied,
        zero=config.parallel.zero,
        sequence=config.parallel.sp,
        overlap=Overlap(config.overlap.dp, in_backward=config.parallel.cp_mode != "hybrid"),
        dtypes=dtypes,
        device=device,
        wgrad=wgrad,
    )


def initialize_weights(buffers: ParamAndGradBuffers, mesh: Mesh, device: Device, seed: int) -> None:
    """Draw this rank's initial weights, which do not depend on the layout."""
    parameters = (
        (bucket.parameters[slot.parameter.name], slot.parameter)
        for bucket in buffers.buckets
        for slot in bucket.layout.slots
    )
    init_parameters(parameters, mesh.topology, mesh.coord, seed, device.host_threads())


def build_stages(
    config: RunConfig,
    mesh: Mesh,
    buffers: ParamAndGradBuffers,
    tp: TensorParallel,
    operators: LayerOps,
    fp8_state: Fp8State,
    offload: ActivationOffload | None = None,
) -> list[Stage]:
    """Build the modules of this rank's model chunks over the weights in `buffers`."""
    layout, stages = stages_of(config.model, config.parallel), []
    cp = context_parallel(config, mesh, operators)
    linear_gemms = partial(build_linear_gemms, state=fp8_state, tp=tp)
    for chunk in range(config.parallel.vpp):
        index = layout.index(mesh.coord.pp, chunk)
        first, last = index == 0, index == layout.count - 1
        recompute = recompute_policy(config.train, chunk)
        parameters, stored = buffers.parameters(chunk), offload if recompute.offload else None
        context = LayerContext(config.model, parameters, tp, operators, linear_gemms, recompute, cp, stored)
        stages.append(Stage(context, layout.layers(index), first, last, buffers.make_bucket_boundary(chunk)))
    return stages


def context_parallel(config: RunConfig, mesh: Mesh, operators: LayerOps) -> ContextParallel | None:
    """Return the attention of ranks that share a sequence; None if each has whole ones."""
    if config.parallel.cp == 1 and config.parallel.cp_mode != "hybrid":
        return None
    from megascale.parallel.context_parallel import ContextParallel

    gathers, attend, part = config.parallel.cp_mode == "allgather", operators.attend, operators.partial_attend
    return ContextParallel(mesh.cp_heads, mesh.cp_keys, attend, part, gathers, config.overlap.cp)


def build_order(config: RunConfig, pp_rank: int, count: int, training: bool) -> RankSchedule:
    """Return a pipeline rank's actions in a training step, or an evaluation, of `count` micro-batches."""
    p = config.parallel
    assert p.schedule is not None, "a resolved configuration names its schedule"
    if p.cp_mode == "hybrid":
        compute = build_schedule(SCHEDULES["1f1b"].load(), p.pp, 1, count)
    elif config.data.chunk_tokens is not None:
        from megascale.schedule.state_aware import build_state_aware

        compute = build_state_aware(p.pp, [config.num_chunks] * (count // config.num_chunks), config.data.keep_chunks)
    else:
        compute = build_schedule(SCHEDULES[p.schedule].load(), p.pp, p.vpp, count)
    compute = compute if training else forwards_only(compute)
    return lower(
        compute, stages_of(config.model, config.parallel).placement, training=training, reduce_each=p.zero == 2
    )[pp_rank]


def build_pipeline(
    config: RunConfig,
    mesh: Mesh,
    stages: list[Stage],
    buffers: ParamAndGradBuffers,
    dtypes: Dtypes,
    device: torch.device,
    offload: ActivationOffload | None = None,
) -> PipelineExecutor:
    """Build the executor of this rank's pipeline actions."""
    m = config.model
    rows = config.row_tokens // mesh.tp.size if config.parallel.sp else config.row_tokens
    tp = single_rank_group("tp") if config.parallel.sp else mesh.tp
    p2p_spec = P2PActivationSpec((rows, config.batch.micro, m.hidden_size), dtypes[0], device, tp)
    placement, overlap = stages_of(config.model, config.parallel).placement, config.overlap.pp
    return PipelineExecutor(stages, placement, buffers, mesh, p2p_spec, dtypes[1], overlap=overlap, offload=offload)
