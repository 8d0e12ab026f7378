"""megatron-core 0.16.1 on one device: GPTModel, data-parallel buffers, optimizer and schedule (see gpu_peer.py).

Layers are Transformer Engine's if installed, as NVIDIA recommends. Otherwise torch's fused attention replaces
megatron-core's own, which materialises the attention scores, to let long sequences fit in memory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from gpu_peer import Refusal, Report, Task, run, timed

from megascale.device import Device

ACTIVATIONS = {"swiglu": F.silu, "gelu": F.gelu, "gelu_tanh": F.gelu}
"""Activation functions. megatron-core's GELU fused with a bias is the tanh approximation."""

ENGINE = "transformer_engine"


def main() -> None:
    """Run the task of the command line."""
    run(train, __doc__)


def train(task: Task, device: Device) -> Report:
    """Build the model as megatron-core's own training loop does, and train."""
    refuse(task)
    if task.cpu:
        sys.path.insert(0, task.patches)
        importlib.import_module("megatron_cpu").patch_megatron_for_cpu()
    import megatron.core
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.pipeline_parallel import get_forward_backward_func

    torch.distributed.init_process_group(device.backend)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=task.cpu)
    tensor_parallel.model_parallel_cuda_manual_seed(task.seed)
    init_num_microbatches_calculator(0, None, task.total, task.micro, 1)
    config, model, optimizer = build(task, device)
    forward_backward = get_forward_backward_func()
    losses: list[torch.Tensor] = []
    positions = torch.arange(task.model["seq_length"], device=device.torch_device).expand(task.micro, -1)

    def forward(batches: Iterator[torch.Tensor], part: Any) -> Any:
        rows = next(batches)
        rows = rows if task.cpu else rows.pin_memory().to(device.torch_device, non_blocking=True)
        out = part(rows[:, :-1].contiguous(), positions, None, labels=rows[:, 1:].contiguous())
        return out, lambda losses: ((mean := losses.float().mean()), {"loss": mean.detach().clone()})

    def step(number: int) -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        results = forward_backward(
            forward_step_func=forward, data_iterator=iter(task.tokens(number).split(task.micro)), model=model,
            num_microbatches=task.total // task.micro, seq_length=task.model["seq_length"],
            micro_batch_size=task.micro, decoder_seq_length=task.model["seq_length"], forward_only=False,
        )  # fmt: skip
        optimizer.step()
        losses.append(torch.stack([result["loss"] for result in results]).mean())

    step_s = timed(task, device, step)
    count = sum(p.numel() for p in model.parameters())
    ends = [float(losses[0]), float(losses[-1])]
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return Report(step_s, ends, count, f"megatron-core {megatron.core.__version__}: {describe(config, optimizer)}")


def refuse(task: Task) -> None:
    """Raises: Refusal for a model or precision without support in megatron-core"""
    if task.model["block"] != "serial":
        raise Refusal("megatron-core has no parallel block")
    if task.precision not in ("fp32", "bf16", "fp8"):
        raise Refusal(f"megatron-core has no {task.precision}")
    if task.precision == "fp8" and find_spec(ENGINE) is None:
        raise Refusal("megatron-core needs Transformer Engine for fp8, which is not installed")


def build(task: Task, device: Device) -> tuple[Any, Any, Any]:
    """Build the configuration, the model in its data-parallel wrapper, and the optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    m, given = task.model, task.optimizer
    config = transformer_config(task)
    model = GPTModel(
        config, layer_spec(m), m["vocab_size"], m["seq_length"],
        share_embeddings_and_output_weights=m["tie_embeddings"],
        position_embedding_type="rope" if m["position"] == "rope" else "learned_absolute",
        rotary_base=int(m["rope_theta"]),
    )  # fmt: skip
    model.to(device.torch_device)
    narrow = task.precision != "fp32"
    wrapped = Float16Module(config, model) if narrow else model
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), wrapped)
    options = OptimizerConfig(
        optimizer="adam", lr=given["lr"], min_lr=given["lr"], weight_decay=given["weight_decay"],
        clip_grad=given["clip_norm"], adam_beta1=given["betas"][0], adam_beta2=given["betas"][1],
        adam_eps=given["eps"], bf16=narrow, params_dtype=torch.bfloat16 if narrow else torch.float32,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, [ddp], use_gloo_process_groups=task.cpu)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss if narrow else None
    return config, ddp, optimizer


def transformer_config(task: Task) -> Any:
    """Build the model's configuration, with every available fusion."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    m, fused, engine = task.model, not task.cpu, find_spec(ENGINE) is not None and not task.cpu
    dtype = torch.float32 if task.precision == "fp32" else torch.bfloat16
    return TransformerConfig(
        num_layers=m["num_layers"], hidden_size=m["hidden_size"], num_attention_heads=m["num_heads"],
        num_query_groups=m["num_kv_heads"], ffn_hidden_size=m["ffn_size"], add_bias_linear=m["bias"],
        normalization="RMSNorm" if m["norm"] == "rmsnorm" else "LayerNorm", layernorm_epsilon=m["norm_eps"],
        gated_linear_unit=m["activation"] == "swiglu", activation_func=ACTIVATIONS[m["activation"]],
        init_method_std=m["init_std"], hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype is torch.bfloat16, use_cpu_initialization=task.cpu,
        bias_activation_fusion=fused, bias_dropout_fusion=fused, cross_entropy_loss_fusion=fused,
        masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=engine,
        gradient_accumulation_fusion=find_spec("fused_weight_gradient_mlp_cuda") is not None,  # Apex's
        fp8="hybrid" if task.precision == "fp8" else None,
    )  # fmt: skip


def layer_spec(model: dict[str, Any]) -> Any:
    """Select Transformer Engine's layers, or megatron-core's own with torch's fused attention."""
    from megatron.core.models.gpt import gpt_layer_specs

    if find_spec(ENGINE) is not None:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm" if model["norm"] == "rmsnorm" else None)
    spec.submodules.self_attention.submodules.core_attention = FusedAttention
    return spec


class FusedAttention(torch.nn.Module):
    """Causal attention over [s, b, heads, d] by torch, in place of megatron-core's."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)


def describe(config: Any, optimizer: Any) -> str:
    """Describe layers, precision and optimizer."""
    engine = find_spec(ENGINE) is not None
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    adam = f"{type(inner).__module__.partition('.')[0]}'s {type(inner).__name__}"
    layers = "Transformer Engine's layers" if engine else "its own layers with torch's SDPA"
    masters = "bf16 with fp32 master weights, gradients summed in fp32" if config.bf16 else "fp32"
    fp8 = f"; fp8 {config.fp8_recipe} scaling" if config.fp8 else ""
    return f"{layers}, {masters}, {adam}, no recomputation{fp8}"


if __name__ == "__main__":
    main()
