"""torchtitan 0.3.0, which needs torch 2.13, on one device with torchtitan's own Trainer (see gpu_peer.py)."""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import gpu_torchtitan_0_2
import torch
from gpu_peer import Refusal, Report, Task, run, timed
from torch import nn

from megascale.device import Device

FORMS = {"fp32": "fp32", "bf16": "bf16", "fp8": "bf16, linear layers but the head in float8 rowwise of torchao,"}

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "block": "serial"}


def main() -> None:
    """Run the task of the command line."""
    run(train, __doc__)


def train(task: Task, device: Device) -> Report:
    """Build torchtitan's trainer and train."""
    unsupported = [f"{key}={task.model[key]}" for key, value in LLAMA.items() if task.model[key] != value]
    if unsupported:
        raise Refusal(f"torchtitan has no such model: {', '.join(unsupported)}")
    if task.precision not in ("fp32", "bf16", "fp8"):
        raise Refusal(f"torchtitan has no {task.precision}")
    titan = version("torchtitan")
    old = titan.startswith("0.2.")
    if task.cpu:
        sys.path.insert(0, task.patches)
        patch = importlib.import_module("torchtitan_cpu").patch
        gpu_torchtitan_0_2.patch_for_cpu(patch) if old else patch()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        if old:
            trainer = gpu_torchtitan_0_2.build_trainer(task, folder, loader_class(task)())
        else:
            trainer = trainer_config(task, folder).build()
        losses: list[float] = []
        trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(float(loss))
        batches = trainer.batch_generator(trainer.dataloader)

        def step(number: int) -> None:
            trainer.step = number + 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(batches)

        step_s = timed(task, device, step)
        count = sum(p.numel() for part in trainer.model_parts for p in part.parameters())
        trainer.close()
        torch.distributed.destroy_process_group()
    compiled = "eager" if task.cpu else "blocks and loss compiled"
    means = "by autocast" if old else "by FSDP2, chunked loss"
    how = (
        f"torchtitan {titan}: {compiled}, weights and AdamW (fused) in fp32, compute in {FORMS[task.precision]} "
        f"{means}, SDPA, no recomputation"
    )
    return Report(step_s, [losses[0], losses[-1]], count, how)


def trainer_config(task: Task, folder: str) -> Any:
    """Build the configuration of a Trainer, like torchtitan's config_registry."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.components.validate import Validator
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import Llama3StateDictAdapter, parallelize_llama
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

    loss = CrossEntropyLoss.Config(global_vocab_size=task.model["vocab_size"])
    given = task.optimizer
    adamw = {key: given[key] for key in ("lr", "betas", "eps", "weight_decay")}
    return Trainer.Config(
        model_spec=ModelSpec(
            name="llama3", flavor="bench", model=model_config(task), parallelize_fn=parallelize_llama,
            pipelining_fn=pipeline_llm, post_optimizer_build_fn=None, state_dict_adapter=Llama3StateDictAdapter,
        ),
        dump_folder=folder,
        tokenizer=tokenizer_config(task),
        dataloader=loader_class(task).Config(),
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        optimizer=OptimizersContainer.Config(
            implementation="fused",
            param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw)],
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0),  # constant
        training=TrainingConfig(
            local_batch_size=task.micro,
            global_batch_size=task.total,
            seq_len=task.model["seq_length"],
            steps=task.warm_up + task.steps,
            max_norm=given["clip_norm"],
            mixed_precision_param="float32" if task.precision == "fp32" else "bfloat16",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        compile=CompileConfig(enable=not task.cpu),
        metrics=MetricsProcessor.Config(disable_color_printing=True),  # logs the first step and every tenth
        validator=Validator.Config(enable=False),
        debug=DebugConfig(seed=task.seed, enable_structured_logging=False),
    )  # fmt: skip


def model_config(task: Task) -> Any:
    """Build a Llama with megascale's initialisation, but one standard deviation for all matrices."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.llama3 import Llama3TransformerBlock
    from torchtitan.models.llama3.model import Llama3Model

    m = task.model
    h, heads, vocab = m["hidden_size"], m["num_heads"], m["vocab_size"]
    normal = {"weight": partial(nn.init.normal_, std=m["init_std"])}
    rope = ComplexRoPE.Config(dim=h // heads, max_seq_len=m["seq_length"], theta=m["rope_theta"])

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=h, eps=m["norm_eps"], param_init={"weight": nn.init.ones_})

    def block() -> Any:
        attention = make_gqa_config(
            dim=h, n_heads=heads, n_kv_heads=m["num_kv_heads"], wqkv_param_init=normal, wo_param_init=normal,
            inner_attention=ScaledDotProductAttention.Config(), fuse_qkv=True, rope=rope,
        )  # fmt: skip
        ffn = make_ffn_config(dim=h, hidden_dim=m["ffn_size"], w1_param_init=normal, w2w3_param_init=normal)
        return Llama3TransformerBlock.Config(
            attention_norm=norm(), ffn_norm=norm(), attention=attention, feed_forward=ffn
        )

    tied = m["tie_embeddings"]
    embedding = {"weight": skip_param_init} if tied else normal
    config = Llama3Model.Config(
        dim=h,
        vocab_size=vocab,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=h, param_init=embedding),
        norm=norm(),
        lm_head=Linear.Config(in_features=h, out_features=vocab, param_init=normal),
        layers=[block() for _ in range(m["num_layers"])],
    )
    return in_float8(config, compiled=not task.cpu) if task.precision == "fp8" else config


def in_float8(config: Any, *, compiled: bool) -> Any:
    """Convert the linear layers, except for the head, to torchao's float8."""
    from torchtitan.components.quantization import Float8LinearConverter

    options = Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=compiled)
    try:
        return options.build().convert(config)
    except (ImportError, ValueError) as error:  # no torchao, or a device without fp8
        raise Refusal(f"torchtitan: {error}") from None


def loader_class(task: Task) -> Any:
    """Return a dataloader class for the task's random tokens, with the `Config` that versions after 0.2 require."""
    from torchtitan.components.dataloader import BaseDataLoader

    class RandomTokens(BaseDataLoader):
        if hasattr(BaseDataLoader, "Config"):

            @dataclass(kw_only=True, slots=True)
            class Config(BaseDataLoader.Config):
                pass

        def __init__(self, config: Any = None, **_: Any) -> None:
            self.steps = range(task.warm_up + task.steps)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            for step in self.steps:
                for rows in task.tokens(step).split(task.micro):
                    yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            return None

    return RandomTokens


def tokenizer_config(task: Task) -> Any:
    """Return the configuration of a stub tokenizer with only a vocabulary size."""
    from torchtitan.components.tokenizer import BaseTokenizer

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            return None

        def encode(self, *_: Any, **__: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *_: Any, **__: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return int(task.model["vocab_size"])

    return NoTokenizer.Config()


if __name__ == "__main__":
    main()
