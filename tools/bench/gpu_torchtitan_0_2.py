"""torchtitan 0.2.2's Trainer, for a torch too old for torchtitan 0.3 (see gpu_torchtitan.py)."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch
from gpu_peer import Refusal, Task
from torch import nn

NAME = "bench"


def patch_for_cpu(patch: Any) -> None:
    """Apply the CPU patches for 0.3 (`patch`), apart from the patches that 0.2 has no place for, and without Triton."""
    kernels = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]  # for MoE layers, absent from a Llama
    sys.modules[kernels.__name__] = kernels
    os.environ["TT_PATCH_SKIP"] = "triton,fsdp_sum,pp_step"
    patch()


def build_trainer(task: Task, folder: str, loader: Any) -> Any:
    """Build a trainer with megascale's initialisation, but one standard deviation for all matrices."""
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.models.llama3 import Transformer, parallelize_llama
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
    from torchtitan.train import Trainer

    if task.model["tie_embeddings"]:
        raise Refusal("torchtitan 0.2 has no llama with tied embeddings")
    spec = TrainSpec(
        model_cls=Transformer, model_args={NAME: model_args(task)}, parallelize_fn=parallelize_llama,
        pipelining_fn=None, build_optimizers_fn=build_optimizers, build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=lambda **_: loader, build_tokenizer_fn=None, build_loss_fn=build_cross_entropy_loss,
    )  # fmt: skip
    register_train_spec(NAME, spec)
    try:
        trainer = Trainer(job_config(task, folder))
    except (ImportError, ValueError) as error:
        if task.precision != "fp8":
            raise
        raise Refusal(f"torchtitan: {error}") from None  # no torchao, or a device without fp8
    with torch.no_grad():
        for part in trainer.model_parts:
            for parameter in part.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=task.model["init_std"])
    return trainer


def model_args(task: Task) -> Any:
    """Return the sizes of a Llama. torchtitan rounds the FFN width 8/3 x dim x ffn_dim_multiplier up to `multiple_of`,
    here to exactly `ffn_size`.
    """
    from torchtitan.models.llama3 import TransformerModelArgs

    m = task.model
    return TransformerModelArgs(
        dim=m["hidden_size"], n_layers=m["num_layers"], n_heads=m["num_heads"], n_kv_heads=m["num_kv_heads"],
        vocab_size=m["vocab_size"], multiple_of=m["ffn_size"], ffn_dim_multiplier=1.5 * 3 / (8 * m["hidden_size"]),
        norm_eps=m["norm_eps"], rope_theta=m["rope_theta"], max_seq_len=m["seq_length"],
    )  # fmt: skip


def job_config(task: Task, folder: str) -> Any:
    """Build the job configuration that `torchtitan.train` reads from a file."""
    from torchtitan.config import JobConfig

    config, given = JobConfig(), task.optimizer
    config.job.dump_folder = folder
    config.model.name = config.model.flavor = NAME
    config.metrics.disable_color_printing = True  # logs the first step and every tenth
    config.optimizer.name, config.optimizer.implementation = "AdamW", "fused"
    config.optimizer.lr, config.optimizer.eps = given["lr"], given["eps"]
    config.optimizer.beta1, config.optimizer.beta2 = given["betas"]
    config.optimizer.weight_decay = given["weight_decay"]
    config.lr_scheduler.warmup_steps, config.lr_scheduler.min_lr_factor = 0, 1.0  # constant
    config.training.local_batch_size, config.training.global_batch_size = task.micro, task.total
    config.training.seq_len = task.model["seq_length"]
    config.training.steps = task.warm_up + task.steps
    config.training.max_norm = given["clip_norm"]
    config.training.mixed_precision_param = "float32" if task.precision == "fp32" else "bfloat16"
    config.activation_checkpoint.mode = "none"
    config.compile.enable = not task.cpu
    config.debug.seed = task.seed
    if task.precision == "fp8":
        config.model.converters = ["quantize.linear.float8"]
        config.quantize.linear.float8.recipe_name = "rowwise"
        config.quantize.linear.float8.filter_fqns = ["output"]
    return config
