"""megatron-core's GPTModel on one CPU process: `python -m tests.oracles.megatron_on_cpu PRECISION FOLDER NAME...`

Writes, for each model of `tests.oracles.ours.MODELS` named, FOLDER/NAME.npz: `weight/...` and `gradient/...` by
megatron-core's names, `logits` [b, s, vocabulary], and `loss`, the sum over the labels that count. A process of its
own, because what megatron-core takes for granted of a GPU has to be replaced in torch itself.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.oracles.ours import MODELS, Batch


def without_gpu() -> None:
    """Tensors are made on the CPU, and dropout (of probability zero here) needs no generator on a GPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core import tensor_parallel

    tensor_parallel.get_cuda_rng_tracker = lambda *_, **__: SimpleNamespace(fork=nullcontext)


def in_fp64() -> None:
    """What megatron-core forms in fp32, whatever its parameters, is formed in fp64: rotary angles and the loss."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)


def build(model: dict[str, Any]) -> Any:
    """The model in the default format, with weights far from where training starts, so that every term counts."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    llama = "position" in model
    config = TransformerConfig(
        num_layers=model["num_layers"],
        hidden_size=model["hidden_size"],
        num_attention_heads=model["num_heads"],
        num_query_groups=model.get("num_kv_heads"),
        ffn_hidden_size=model.get("ffn_size", 4 * model["hidden_size"]),
        normalization="RMSNorm" if llama else "LayerNorm",
        layernorm_epsilon=1e-5,
        gated_linear_unit=llama,
        activation_func=F.silu if llama else F.gelu,
        add_bias_linear=not llama,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.get_default_dtype(),
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    net = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        model["vocab_size"],
        model["seq_length"],
        share_embeddings_and_output_weights=model.get("tie_embeddings", True),
        position_embedding_type="rope" if llama else "learned_absolute",
        rotary_base=model.get("rope_theta", 10_000),
    )
    generator = torch.Generator().manual_seed(3)
    for name, parameter in net.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
        is_gain = parameter.dim() == 1 and name.endswith("weight")
        parameter.data = (drawn + is_gain).bfloat16().to(parameter.dtype)
    return net


def run(net: Any) -> dict[str, Any]:
    """Weights, logits, loss and gradients for the common batch."""
    batch = Batch()
    samples, s = batch.tokens.shape
    positions = torch.arange(s).expand(samples, s)
    future = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    logits = net(batch.tokens, positions, future)
    losses = net(batch.tokens, positions, future, labels=batch.labels)
    loss = (losses * batch.mask).sum()
    loss.backward()
    assert logits.dtype == losses.dtype == torch.get_default_dtype()
    found = {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
    for name, parameter in net.named_parameters():
        found[f"weight/{name}"] = parameter.detach().numpy()
        found[f"gradient/{name}"] = parameter.grad.numpy()
    return found


def main(precision: str, folder: str, *names: str) -> None:
    """One file for each name."""
    without_gpu()
    if precision == "fp64":
        in_fp64()
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for name in names:
        np.savez(Path(folder) / f"{name}.npz", **run(build(MODELS[name])))


if __name__ == "__main__":
    main(*sys.argv[1:])
