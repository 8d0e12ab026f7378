"""Construction of a run from a configuration: mesh, buffers, stages, optimizer, pipeline, loaders, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch

from megascale.catalog.precisions import PRECISIONS
from megascale.checkpoint.checkpoints import Checkpoints
from megascale.checkpoint.format.state import Progress
from megascale.comm.mesh import Mesh, open_mesh
from megascale.comm.warm_up import warm_up
from megascale.config.batch_rampup import batch_sizes
from megascale.config.data import DataConfig
from megascale.config.model import ModelConfig
from megascale.config.moe import MoeConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.run import RunConfig
from megascale.config.train import BatchConfig, TrainConfig
from megascale.core.rank import Rank
from megascale.device import Device, profiler_range
from megascale.layout.chunks import chunk_buckets, embedding_chunks, fp8_layers, shares_embedding, stages_of
from megascale.layout.param_groups import ParamGroups
from megascale.layout.recompute_policy import joined_chunks, recompute_policy
from megascale.layout.stages import Stages
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, ParamSpec
from megascale.layout.topology import DATA_AXES, REPLICATE, inner_axes, topology_of
from megascale.model.initialize import init_parameters
from megascale.model.layer_ops import LayerOps
from megascale.model.modules import LayerContext
from megascale.model.transformer import Stage
from megascale.ops import select
from megascale.ops.select import OpContext
from megascale.ops.wgrad import Wgrad
from megascale.optim.lr import learning_rate
from megascale.optim.outer_optimizer import OuterOptimizer
from megascale.optim.sharded import ShardedOptimizer
from megascale.parallel.activation_messages import P2PActivationSpec
from megascale.parallel.param_and_grad_buffers import BucketCommunication, ParamAndGradBuffers
from megascale.parallel.pipeline import PipelineExecutor
from megascale.parallel.projected_gemms import rule_gemms
from megascale.parallel.stateful import Stateful
from megascale.parallel.tp_overlap import TensorParallel
from megascale.parallel.vocabulary import VocabularyRange
from megascale.record.label import FORWARD, Label
from megascale.record.log import RankLog
from megascale.record.recorder import Recorder
from megascale.schedule.ir import RankSchedule, forwards_only
from megascale.schedule.lower import compute_order, lower, with_passes
from megascale.train.batch_totals import batch_totals
from megascale.train.build_loaders import build_loaders
from megascale.train.build_optimizer import build_optimizer
from megascale.train.further_losses import FurtherLosses
from megascale.train.memory_choice import build_store
from megascale.train.op_context import op_context
from megascale.train.run import Dtypes, Hook, Hooks, Run
from megascale.train.stop import StopRequest

if TYPE_CHECKING:
    from megascale.comm.group import Group
    from megascale.data.mix.loader import Loader
    from megascale.parallel.context_parallel import ContextParallel
    from megascale.parallel.experts.expert_parallel import ExpertParallel
    from megascale.parallel.fp8_state import Fp8State
    from megascale.parallel.vocabulary_passes import VocabularyPasses
    from megascale.train.expert_steps import ExpertState
    from megascale.train.noise_scale import NoiseScale
    from megascale.train.policy_state import PolicyState
    from megascale.train.weight_average import WeightAverage

VOCABULARY_AXES = [("pp",), ("tp", "pp")]  # along which ranks sum activations, and share the rows of the vocabulary
KEPT_ORDERS = 32  # orders of actions that are kept; steps have a few numbers of micro-batches


def build_mesh(config: RunConfig, rank: Rank, device: Device, log: RankLog | None = None) -> Mesh:
    """Open and warm up this rank's process groups. Requires `comm.init.init_distributed`. `log`: this rank's."""
    topology, placement = topology_of(config.parallel), stages_of(config.model, config.parallel).placement
    recorder = Recorder(device.timer(), log, enabled=config.observe.record_events, named_range=profiler_range)
    mesh = open_mesh(
        topology,
        rank.rank,
        tied=shares_embedding(config.model, config.parallel),
        placement=placement,
        recorder=recorder,
        launch=config.launch,
        comm=config.comm,
        nccl=config.nccl,
    )
    recorder.log.start_parts.begin("warm-up")
    data: list[tuple[str, ...]] = [DATA_AXES, ("edp",)] if config.model.experts else [DATA_AXES]
    inner = [*map(inner_axes, data)] if topology.dp_replicate > 1 else data
    axes = [*inner, (REPLICATE,), *data] if topology.dp_replicate > 1 else [*data]
    axes += sorted(config.moe.shared_axes(config.batch.micro)) if config.model.experts else []
    axes += VOCABULARY_AXES if config.parallel.vocab_pp else []
    further = [group for each in axes if (group := mesh.group(*each)) is not mesh.dp]
    matrices = config.parallel.zero > 0 and ParamGroups(config.optimizer).needs_matrix
    sharing = data if topology.state_over_all else inner
    owners = [mesh.group(*each) for each in sharing] if matrices else []
    warm_up(mesh, device, placement.links, owners=owners, further=further)
    return mesh


def build_rank_run(
    config: RunConfig, mesh: Mesh, device: Device, stop: StopRequest, *, init_weights: bool = True
) -> Run:
    """Build this rank's part of a run from a resolved configuration and a mesh of the same layout.

    `init_weights`: draw the initial weights; otherwise they are zero.
    """
    p, sites, layout = config.parallel, config.sites, stages_of(config.model, config.parallel)
    device.leave_sms(config.nccl.pp_carveout)
    dtypes, on = run_dtypes(config.train.precision), device.torch_device
    shape, context = (config.row_tokens, config.batch.micro, config.model.hidden_size), op_context(config, device)
    nbytes = math.prod(shape) * dtypes[0].itemsize
    tp = build_tensor_parallel(mesh.tp, device, p, overlap=config.overlap.tp, activation_bytes=nbytes)
    buffers, fp8_state = build_weights(config, mesh, device, context, dtypes, init_weights=init_weights)
    operators, store = LayerOps.from_context(context), build_store(config, mesh.coord.pp, device)
    cp = build_context_parallel(p, mesh, operators, overlap=config.overlap.cp)
    experts, expert_state = build_experts(config.model, config.moe, config.batch.micro, mesh, device)
    gemms = rule_gemms(config.model, config.optimizer, tp)
    layers = LayerContext(config.model, {}, tp, operators, gemms, cp=cp, store=store, experts=experts)
    stages = build_stages(layout, mesh.coord.pp, config.train, buffers, layers, fp8_state)
    optimizer, guard = build_optimizer(config, mesh, buffers, context, device)
    mesh.recorder.log.start_parts.begin("indices")
    noise_scale = build_noise_scale(config.train, mesh, buffers, on, sequence=p.sp)
    average = build_average(config.train, optimizer, mesh)
    outer = OuterOptimizer(sites, optimizer.shards, config.model.total_layers, mesh) if sites.count > 1 else None
    train, valid, valid_batches = build_loaders(config, mesh, on)
    spec, overlap = P2PActivationSpec.of(shape, dtypes[0], on, tp), config.overlap.pp
    pipeline = PipelineExecutor(stages, buffers, mesh, spec, dtypes[1], overlap=overlap, store=store)
    if p.vocab_pp:
        pipeline.passes = build_passes(config.model, p, dtypes[1], mesh, buffers, tp, operators, spec)
    policy = build_policy(config.data, config.batch, mesh, pipeline, train, on)
    losses = experts.losses if experts else None
    totals = batch_totals(config.model, config.batch, config.data, config.train, noise_scale, losses)
    sizes = batch_sizes(config.batch) if config.batch.rampup else None
    parts = (optimizer, fp8_state, guard, noise_scale, average, policy, expert_state, outer)
    mesh.recorder.log.start_parts.begin("build")
    return Run(
        config=config, device=device, mesh=mesh, dtypes=dtypes, stages=stages, buffers=buffers, fp8_state=fp8_state,
        noise_scale=noise_scale, policy=policy, average=average, outer=outer, optimizer=optimizer, pipeline=pipeline,
        order_of=lru_cache(KEPT_ORDERS)(partial(build_order, config, mesh.coord.pp)),
        train_loader=train, valid_loader=valid, valid_batches=valid_batches,
        lr=learning_rate(config.optimizer, config.train.steps, sizes),
        checkpoints=build_checkpoints(config, mesh, parts, device), progress=Progress(), stop=stop,
        step_hooks=build_step_hooks(totals, fp8_state, expert_state),
    )  # fmt: skip


def build_weights(
    config: RunConfig, mesh: Mesh, device: Device, context: OpContext, dtypes: Dtypes, *, init_weights: bool
) -> tuple[ParamAndGradBuffers, Fp8State | None]:
    """Build the buffers of this rank's weights and gradients, and the state of FP8 casts."""
    p, wgrad = config.parallel, select.build_op("wgrad", context)
    chunks = chunk_buckets(config.model, p, config.overlap, config.train, mesh.coord.pp)
    buffers = build_buffers(chunks, mesh, p, dtypes, device.torch_device, wgrad, overlap=config.overlap.dp)
    buffers.share_embedding(embedding_chunks(config.model, p, mesh.coord.pp))
    for bucket in buffers.buckets if init_weights else ():
        with bucket.whole_weights():
            init_parameters(bucket.shards(), mesh.topology, mesh.coord, config.train.seed, device.host_threads())
    fp8_state = build_fp8(config, mesh, context, buffers)
    if p.zero == 3:
        buffers.shard_weights(streams=p.resharding == "forward")
    return buffers, fp8_state


def build_checkpoints(config: RunConfig, mesh: Mesh, parts: Sequence[Stateful | None], device: Device) -> Checkpoints:
    """Build what saves and resumes the state of `parts`; None: the run is without it."""
    saved = config.model_dump(by_alias=True, mode="json")
    folders, present = (config.folder, config.checkpoint_folder), [part for part in parts if part is not None]
    return Checkpoints(config.checkpoint, config.model, saved, *folders, mesh, present, device)


def build_tensor_parallel(
    group: Group, device: Device, parallel: ParallelConfig, *, overlap: bool | str, activation_bytes: int
) -> TensorParallel:
    """Return the tensor parallelism of this rank, whose peers' memory is mapped where pieces overlap.
    `activation_bytes`: of an activation between layers on all of its ranks.
    """
    fused, domino = None, overlap == "domino"
    if overlap and not domino and group.size > 1 and not device.is_cpu:
        from megascale.comm.symmetric_memory import SymmetricMemory, can_map_peers

        if can_map_peers(group, device):
            fused = SymmetricMemory(group)
            fused.reserve(activation_bytes // group.size)
    return TensorParallel(group, parallel.sp, bool(overlap), fused, gpu=not device.is_cpu, domino=domino)


def build_fp8(config: RunConfig, mesh: Mesh, context: OpContext, buffers: ParamAndGradBuffers) -> Fp8State | None:
    """Build the statistics of FP8 operands, and the codes of sharded weights, with the kernels of the selected backend;
    None without FP8.
    """
    if not config.train.quantizes:
        return None
    from megascale.parallel.fp8_codes import ShardedCodes
    from megascale.parallel.fp8_phases import later_phases
    from megascale.parallel.fp8_state import Fp8State

    kernels, layers = select.build_op("linear", context), fp8_layers(config.model, config.train, config.fp8)
    device, seed = context.device.torch_device, config.train.seed
    later = later_phases(config.fp8, lambda recipe: select.build_op("linear", replace(context, recipe=recipe)))
    state = Fp8State(config.model, config.fp8, layers, mesh, device, kernels, seed=seed, later=later)
    state.keeps_weights = config.parallel.zero < 3
    if config.parallel.zero:
        state.cast_shards = ShardedCodes(buffers.buckets, state, mesh.tp, overlap=config.overlap.dp).encode
    return state


def build_noise_scale(
    settings: TrainConfig, mesh: Mesh, buffers: ParamAndGradBuffers, device: torch.device, *, sequence: bool
) -> NoiseScale | None:
    """Build what measures the gradient noise scale, with `train.noise_scale_every`. `sequence`: with sp."""
    if not settings.noise_scale_every:
        return None
    from megascale.optim.first_gradient import FirstGradient
    from megascale.train.noise_scale import NoiseScale

    return NoiseScale(settings, FirstGradient(buffers.trained, mesh, device, sequence=sequence), mesh, device)


def build_average(settings: TrainConfig, optimizer: ShardedOptimizer, mesh: Mesh) -> WeightAverage | None:
    """Build the average of the weights, with `train.weight_average`."""
    if settings.weight_average == "none":
        return None
    from megascale.train.weight_average import WeightAverage

    return WeightAverage(settings, optimizer.shards, mesh)


def build_policy(
    data: DataConfig, batch: BatchConfig, mesh: Mesh, pipeline: PipelineExecutor, loader: Loader, device: torch.device
) -> PolicyState | None:
    """Build the state of the data policy, with `data.blend_policy`."""
    if data.blend_policy is None:
        return None
    from megascale.data.mix.batch_shape import BatchShape
    from megascale.train.policy_state import PolicyState

    shape = BatchShape(batch.total, batch.micro, mesh.topology.dp)
    policy = PolicyState(data, shape, loader.change_weights, mesh, device)
    pipeline.on_loss = policy.add_loss if policy.uses_losses else None
    return policy


def build_step_hooks(totals: Sequence[Hook], fp8_state: Fp8State | None, expert_state: ExpertState | None) -> Hooks:
    """Return the hooks of the features that are part of a step: totals over the batch, or state that follows."""
    hooks = Hooks(totals)
    if fp8_state is not None:
        from megascale.train.fp8_casts import Fp8Steps

        hooks.add(Fp8Steps(fp8_state))
    if expert_state is not None:
        from megascale.train.expert_steps import ExpertSteps

        hooks.add(ExpertSteps(expert_state))
    hooks.add(FurtherLosses())
    return hooks


def run_dtypes(precision: str) -> Dtypes:
    """The compute and accumulation dtypes of `train.precision`."""
    facts = PRECISIONS[precision].facts
    return getattr(torch, facts["compute_dtype"]), getattr(torch, facts["accumulate_dtype"])


def build_buffers(
    chunks: Sequence[Sequence[Sequence[ParamSpec]]], mesh: Mesh, parallel: ParallelConfig, dtypes: Dtypes,
    device: torch.device, wgrad: Wgrad, *, overlap: bool,
) -> ParamAndGradBuffers:  # fmt: skip
    """Allocate this rank's weights and main gradients. `chunks`: the parameters of its buckets
    (`layout.chunks.chunk_buckets`). `wgrad`: the GEMM that accumulates into the gradients.
    """
    return ParamAndGradBuffers(
        chunks,
        mesh,
        zero=parallel.zero,
        sequence=parallel.sp,
        communication=BucketCommunication(overlap, not parallel.hybrid_dp, parallel.grad_reduce == "fp8"),
        dtypes=dtypes,
        device=device,
        wgrad=wgrad,
    )


def build_stages(
    layout: Stages, pp_rank: int, settings: TrainConfig, buffers: ParamAndGradBuffers, context: LayerContext,
    fp8_state: Fp8State | None = None,
) -> list[Stage]:  # fmt: skip
    """Build the modules of this rank's model chunks over the weights in `buffers`. `context`: of all layers, without
    parameters and recomputation.
    """
    if fp8_state is not None:
        from megascale.parallel.experts.fp8_gemms import build_grouped_gemms
        from megascale.parallel.fp8_linear import build_linear_gemms

        linear = partial(build_linear_gemms, state=fp8_state, tp=context.tp)
        grouped = partial(build_grouped_gemms, state=fp8_state)
        context = replace(context, linear_gemms=linear, grouped_gemms=grouped)
    stages = []
    for chunk in range(layout.vpp):
        index, policy = layout.index(pp_rank, chunk), partial(recompute_policy, settings)
        own, ends = replace(context, parameters=buffers.parameters(chunk)), (index == 0, index == layout.count - 1)
        stages.append(Stage(own, layout.layers(index), *ends, buffers.make_bucket_boundary(chunk), policy))
    return stages


def build_passes(
    model: ModelConfig, p: ParallelConfig, wide: torch.dtype, mesh: Mesh, buffers: ParamAndGradBuffers,
    tp: TensorParallel, operators: LayerOps, spec: P2PActivationSpec,
) -> VocabularyPasses:  # fmt: skip
    """Build the passes of vocabulary parallelism over this rank's rows."""
    from megascale.parallel.vocabulary_passes import StageSums, VocabularyPasses

    stages, ranks = (mesh.group(*axes) for axes in VOCABULARY_AXES)
    rows = VocabularyRange.for_rank(model, ranks.index, ranks.size)
    parameters, (first, last) = buffers.parameters(p.vpp), (end == mesh.coord.pp for end in mesh.placement.ends)
    embedding, kernels = parameters[TOKEN_EMBEDDING], operators.cross_entropy
    embedded, hidden = (Label(name, direction=FORWARD) for name in ("embedding", "hidden"))
    used = {embedded: first, embedded.for_backward("gradient"): True, hidden: True,
            hidden.for_backward("gradient"): last}  # fmt: skip
    return VocabularyPasses(
        p.vpp, buffers, embedding, parameters.get(HEAD, embedding), rows, tp, ranks, kernels, p.vocab_pp, wide,
        *(StageSums(stages, spec, label, here) for label, here in used.items()),
    )  # fmt: skip


def build_context_parallel(
    parallel: ParallelConfig, mesh: Mesh, operators: LayerOps, *, overlap: bool
) -> ContextParallel | None:
    """Return the attention of ranks that share a sequence; None if each has whole ones."""
    if parallel.cp == 1 and not parallel.hybrid_dp:
        return None
    from megascale.parallel.context_parallel import ContextParallel

    gathers, attend, part = parallel.cp_mode == "allgather", operators.attend, operators.partial_attend
    return ContextParallel(mesh.cp_heads, mesh.cp_keys, attend, part, gathers, overlap)


def build_experts(
    model: ModelConfig, moe: MoeConfig, micro: int, mesh: Mesh, device: Device
) -> tuple[ExpertParallel | None, ExpertState | None]:
    """Return the parallelism of experts, and the state that balances them; None of a dense model."""
    if not model.experts:
        return None, None
    from megascale.ops.routing import Routing
    from megascale.parallel.experts.all_gather import plan_all_gather
    from megascale.parallel.experts.all_to_all import plan_all_to_all
    from megascale.parallel.experts.capacity import Capacity
    from megascale.parallel.experts.expert_parallel import ExpertParallel
    from megascale.parallel.experts.rank_tokens import RankTokens
    from megascale.parallel.experts.router_losses import RouterLosses
    from megascale.train.expert_steps import BIAS, CHOICES, ExpertState

    kept = {BIAS: model.balance_bias, CHOICES: moe.balance == "step"}
    names, shape = [name for name, used in kept.items() if used], (model.total_layers, model.experts)
    state, losses, capacity = ExpertState(names, shape, mesh, device.torch_device), None, None
    tokens = RankTokens(model.seq_length, micro, mesh.coord.tp, mesh.topology.dp, mesh.coord.dp)
    if moe.balance != "none" or moe.z_loss_weight:
        losses = RouterLosses(moe, model, tokens, mesh.group(*moe.region_axes(micro)), state.layers(CHOICES))
    if moe.capacity_factor is not None:
        capacity = Capacity(moe.capacity_factor, model, mesh.group("tp", "cp"), tokens)
    plan = {"all_to_all": plan_all_to_all, "all_gather": plan_all_gather}[moe.dispatcher]
    exchange = mesh.group("ep"), Routing(model), plan, tokens, moe.token_blocks, device.read_counts
    return ExpertParallel(*exchange, state.layers(BIAS), losses, capacity), state


def build_order(config: RunConfig, pp_rank: int, count: int, training: bool) -> RankSchedule:
    """Return a pipeline rank's actions in a training step, or an evaluation, of `count` micro-batches."""
    p, layout = config.parallel, stages_of(config.model, config.parallel)
    placement = layout.placement if training else layout.placement.whole
    joined, sequence = joined_chunks(config.train, p, layout), (config.num_chunks, config.data.sequence_chunks_saved)
    assert p.schedule is not None, "a resolved configuration names its schedule"
    compute = compute_order(p.schedule, placement, count, joined, *sequence)
    if not training:
        compute = with_passes(forwards_only(compute), placement)
    return lower(compute, placement, training=training, reduce_each=p.zero >= 2, reshard=p.resharding)[pp_rank]
