"""megatron-core as it trains on CPU processes, saves and loads: what conversions are compared with. Ranks of a world
run it, and nothing else after it, because what megatron-core takes for granted of a GPU is replaced in torch.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megascale.core.rank import Rank
from tests.oracles.ours import Array
from tests.parallel.experts.megatron_layer import without_streams

LR, BETAS, WEIGHT_DECAY = 1e-2, (0.9, 0.95), 0.1

RESHARDABLE, BUCKETS = "fully_reshardable", "dp_reshardable"
LEGACY = "legacy"


@dataclass(frozen=True)
class Task:
    """A run of megatron-core from step `first` up to `last` on `tokens` [steps, samples, s + 1].

    `arguments`: Megatron-LM's, of the model. `layout`: tp, pp, vpp, ep. `distributed`: the kind of distributed
    optimizer, none of a plain one. `schedule`: the least rate, the samples of warm-up and decay, and the style.
    `load`, `save`: folders of checkpoints; in the latter, LEGACY has the same one in
    the format `torch`.
    """

    arguments: dict[str, Any]
    tokens: Tensor
    layout: dict[str, int] = field(default_factory=dict)
    distributed: str = ""
    schedule: tuple[float, int, int, str] = (LR, 0, 1000, "constant")
    bucket_size: int | None = None
    load: Path | None = None
    save: Path | None = None
    first: int = 0
    save_at: int = 5
    last: int = 10
    dtype: torch.dtype = torch.float32


@dataclass
class Outcome:
    """Losses of the steps on this rank (of the last stage), and its parameters with their moments at `save_at`, or as
    loaded.
    """

    losses: list[float]
    state: dict[str, dict[str, Array]]


def without_gpu() -> None:
    """What names a GPU means the CPU."""
    warnings.simplefilter("ignore")
    without_streams()
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    for name in ("empty", "zeros", "ones", "tensor"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *to: kind(self, *to) if to else kind(self).replace("torch.", "torch.cuda.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._get_write_results_queue = Queue  # of this process, which waits for those that write
    multiprocessing.current_process()._config["daemon"] = False  # they are children of a rank


def with_torch_adam() -> None:
    """Moments load into torch's Adam, where neither Transformer Engine nor Apex is installed: its step is a tensor of
    each parameter, which was loaded before.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def put_with_step(self: Any, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        put(self, parameter, {"step": self._get_main_param_and_optimizer_states(parameter)["step"]} | tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = put_with_step


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def on_cpu(*values: Any, **named: Any) -> Tensor:
        if "cuda" in str(named.get("device")):
            named["device"] = "cpu"
        return make(*values, **named)

    return on_cpu


class Session:
    """Model, optimizer and schedule of a task on this rank."""

    def __init__(self, task: Task) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.task, self.ps = task, parallel_state
        tp, pp, vpp, ep = (task.layout.get(name, 1) for name in ("tp", "pp", "vpp", "ep"))
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            vpp if vpp > 1 else None,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1 if ep > 1 else None,
        )
        model_parallel_cuda_manual_seed(7)
        self.config = transformer_config(task)
        self.config.finalize_model_grads_func = finalize_model_grads
        nets = [self._net(chunk if vpp > 1 else None) for chunk in range(vpp)]
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=bool(task.distributed),
            bucket_size=task.bucket_size,
            overlap_grad_reduce=bool(task.bucket_size),
        )
        self.model = [
            DistributedDataParallel(self.config, ddp, net, disable_bucketing=number > 0)
            for number, net in enumerate(nets)
        ]
        low = task.dtype == torch.bfloat16
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=LR,
                min_lr=task.schedule[0],
                weight_decay=WEIGHT_DECAY,
                clip_grad=1.0,
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                adam_eps=1e-8,
                use_distributed_optimizer=bool(task.distributed),
                bf16=low,
                params_dtype=task.dtype,
            ),
            self.model,
        )
        if low:
            self.config.grad_scale_func = self.optimizer.scale_loss
        self.schedule = OptimizerParamScheduler(
            self.optimizer, 0.0, LR, *task.schedule, WEIGHT_DECAY, WEIGHT_DECAY, 1000, "constant"
        )
        self.metadata: dict[str, Any] = {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}
        self.metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if task.distributed:
            self.metadata["distrib_optim_sharding_type"] = task.distributed

    def _net(self, chunk: int | None) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
        from megatron.core.transformer.module import Float16Module

        config, args = self.config, SimpleNamespace(**self.task.arguments)
        whole = chunk is None
        if config.num_moe_experts:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=chunk)
            for layer in spec.layer_specs:  # named as in Transformer Engine, which fuses the norm with no experts
                layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        else:
            spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
        net = GPTModel(
            config, spec, args.padded_vocab_size, args.max_position_embeddings,
            pre_process=self.ps.is_pipeline_first_stage(ignore_virtual=whole, vp_stage=chunk),
            post_process=self.ps.is_pipeline_last_stage(ignore_virtual=whole, vp_stage=chunk),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base, vp_stage=chunk,
        )  # fmt: skip
        return Float16Module(config, net) if self.task.dtype == torch.bfloat16 else net

    def train_step(self, step: int) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rank, size = self.ps.get_data_parallel_rank(), self.ps.get_data_parallel_world_size()
        rows = self.task.tokens[step][rank::size].unsqueeze(1)  # micro-batches of a sample
        positions = torch.arange(rows.shape[-1] - 1).unsqueeze(0)

        def forward(samples: Iterator[Tensor], net: Any) -> Any:
            row = next(samples)
            losses = net(row[:, :-1], positions, None, labels=row[:, 1:])
            return losses, lambda found: (found.float().mean(), {"loss": found.float().mean().detach().clone()})

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        samples = [iter(rows) for _ in self.model]
        several = len(self.model) > 1
        found = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=samples if several else samples[0],
            model=self.model if several else self.model[0], num_microbatches=len(rows),
            seq_length=rows.shape[-1] - 1, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        self.optimizer.step()
        self.schedule.step(increment=len(self.task.tokens[step]))
        loss = torch.tensor([sum(float(one["loss"]) for one in found) / len(rows) / size if found else 0.0])
        dist.all_reduce(loss, group=self.ps.get_data_parallel_group())
        return loss.item()

    def sharded(self, loading: bool) -> dict[str, Any]:
        """The state dict as Megatron-LM builds it."""
        nets = {
            "model" if len(self.model) == 1 else f"model{number}": _bare(chunk).sharded_state_dict(
                metadata=self.metadata
            )
            for number, chunk in enumerate(self.model)
        }
        optimizer = self.optimizer.sharded_state_dict(nets, is_loading=loading, metadata=self.metadata)
        return nets | {"optimizer": optimizer}

    def common(self, step: int) -> dict[str, Any]:
        from argparse import Namespace

        layout = {
            "tensor_model_parallel_size": self.task.layout.get("tp", 1),
            "pipeline_model_parallel_size": self.task.layout.get("pp", 1),
            "virtual_pipeline_model_parallel_size": self.task.layout.get("vpp"),
            "expert_model_parallel_size": self.task.layout.get("ep", 1),
            "expert_tensor_parallel_size": 1 if self.task.layout.get("ep", 1) > 1 else None,
            "consumed_train_samples": step * self.task.tokens.shape[1],
            "params_dtype": self.task.dtype,
            "use_distributed_optimizer": bool(self.task.distributed),
        }
        return {
            "args": Namespace(**self.task.arguments | layout), "iteration": step, "checkpoint_version": 3.0,
            "opt_param_scheduler": self.schedule.state_dict(), "num_floating_point_operations_so_far": 0,
        }  # fmt: skip

    def save(self, folder: Path, step: int) -> None:
        from megatron.core import dist_checkpointing

        path = folder / f"iter_{step:07d}"
        path.mkdir(parents=True, exist_ok=True)
        content = {key: value for key, value in self.metadata.items() if key != "dp_cp_group"}
        state = self.common(step) | self.sharded(loading=False)
        dist_checkpointing.save(state, str(path), content_metadata=content)
        self._save_legacy(folder / LEGACY / path.name, step)
        dist.barrier()
        if dist.get_rank() == 0:
            for saved in (folder, folder / LEGACY):
                (saved / "latest_checkpointed_iteration.txt").write_text(str(step))

    def _save_legacy(self, path: Path, step: int) -> None:
        tp, pp, ep = (
            self.ps.get_tensor_model_parallel_rank(), self.ps.get_pipeline_model_parallel_rank(),
            self.ps.get_expert_model_parallel_rank(),
        )  # fmt: skip
        name = f"mp_rank_{tp:02d}" + f"_{pp:03d}" * (self.ps.get_pipeline_model_parallel_world_size() > 1)
        name += f"_{ep:03d}" * (self.task.layout.get("ep", 1) > 1)
        (path / name).mkdir(parents=True, exist_ok=True)
        if self.ps.get_data_parallel_rank() == 0 or self.ps.get_expert_data_parallel_rank() == 0:
            nets = {
                "model" if len(self.model) == 1 else f"model{number}": _bare(chunk).state_dict_for_save_checkpoint()
                for number, chunk in enumerate(self.model)
            }
            state = self.common(step) | nets | {"optimizer": self.optimizer.state_dict()}
            torch.save(state, path / name / "model_optim_rng.pt")

    def load(self, folder: Path) -> int:
        """Load strictly. Returns the step."""
        from megatron.core import dist_checkpointing

        for optimizer in self.optimizer.chained_optimizers:
            optimizer._init_optimizer_states_with_dummy_values()  # torch's Adam has none before the first step
        path = folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"
        state = dist_checkpointing.load(self.sharded(loading=True), str(path), strict="raise_all")
        for number, chunk in enumerate(self.model):
            _bare(chunk).load_state_dict(state["model" if len(self.model) == 1 else f"model{number}"], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])
        for optimizer in self.optimizer.chained_optimizers:
            for moments in optimizer.optimizer.state.values():  # which share the step, that torch's Adam counts up
                moments["step"] = moments["step"].clone()
        self.schedule.load_state_dict(state["opt_param_scheduler"])
        step: int = state["iteration"]
        return step

    def state(self) -> dict[str, dict[str, Array]]:
        """Parameters of this rank by chunk and name, each with its moments, or the part of them that the rank has."""
        names, found = dict[Any, str](), dict[str, dict[str, Array]]()
        for number, chunk in enumerate(self.model):
            for name, parameter in _bare(chunk).named_parameters():
                names[parameter] = f"{number}.{name}"
                found[names[parameter]] = {"weight": parameter.detach().float().numpy().copy()}
        for parameter, name in names.items():
            for moment, tensor in self._moments(parameter).items():
                found[name][moment] = tensor.detach().numpy().copy()
        return found

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        for optimizer in self.optimizer.chained_optimizers:
            if self.task.distributed and parameter in optimizer.model_param_group_index_map:
                state = optimizer._get_main_param_and_optimizer_states(parameter)
            elif not self.task.distributed:
                state = optimizer.optimizer.state.get(getattr(parameter, "main_param", parameter), {})
            else:
                continue
            if state:
                return {moment: state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        return {}


def _bare(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def transformer_config(task: Task) -> Any:
    """The configuration of the model by Megatron-LM's arguments."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    args, pp = SimpleNamespace(**task.arguments), task.layout.get("pp", 1)
    experts = {}
    if args.num_experts:
        experts = {
            "num_moe_experts": args.num_experts, "moe_router_topk": args.moe_router_topk,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size, "moe_layer_freq": args.moe_layer_freq,
            "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
            "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall",
            "moe_router_enable_expert_bias": args.moe_router_enable_expert_bias,
            "moe_router_score_function": args.moe_router_score_function,
        }  # fmt: skip
    several = task.layout.get("vpp", 1) > 1
    return TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        ffn_hidden_size=args.ffn_hidden_size, normalization=args.normalization, layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu, activation_func=F.silu if args.swiglu else F.gelu,
        add_bias_linear=args.add_bias_linear, qk_layernorm=args.qk_layernorm, hidden_dropout=0.0,
        attention_dropout=0.0, tensor_model_parallel_size=task.layout.get("tp", 1), pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=task.layout.get("vpp") if several else None,
        expert_model_parallel_size=task.layout.get("ep", 1),
        expert_tensor_parallel_size=1 if task.layout.get("ep", 1) > 1 else task.layout.get("tp", 1),
        params_dtype=task.dtype, pipeline_dtype=task.dtype, bf16=task.dtype == torch.bfloat16,
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False, overlap_p2p_comm=several, batch_p2p_comm=not several,
        deallocate_pipeline_outputs=not several, init_method_std=0.1, **experts,
        **{name: value for name, value in task.arguments.items() if name.startswith("window_")},
    )  # fmt: skip


def run(rank: Rank, task: Task) -> Outcome:
    """Train, with a checkpoint on the way, or from one."""
    without_gpu()
    with_torch_adam()
    session = Session(task)
    first, losses = task.first, []
    state: dict[str, dict[str, Array]] = {}
    if task.load:
        first = session.load(task.load)
        state = session.state()
    for step in range(first, task.last):
        losses.append(session.train_step(step))
        if task.save and step + 1 == task.save_at:
            state = session.state()
            session.save(task.save, step + 1)
    return Outcome(losses, state)
