"""megatron-core's MoE layer on CPU processes: its side of a comparison. Ranks of a world run it, and nothing else after
it, because what megatron-core takes for granted of a GPU is replaced in torch itself.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.core.rank import Rank
from tests.oracles.megatron_on_cpu import without_gpu
from tests.oracles.ours import Array, Arrays

DISPATCHERS = "alltoall", "allgather"


@dataclass(frozen=True)
class Task:
    """Micro-batches of the input `x` and of the gradient of the output `dy`, [micro-batches, s, b, h], of which rank r
    of n takes r, r + n, ...; the sizes of our `model`; megatron-core's `settings`; the layer's `weights`, by
    megatron-core's names; and the `bias` of experts, if it has one.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    x: Array
    dy: Array
    weights: Arrays
    bias: Array | None


@dataclass(frozen=True)
class Answer:
    """What a layer computed on a rank: arrays by micro-batch, and sums over micro-batches, which add up over ranks:
    losses, choices of each expert, and `gradient/NAME`.
    """

    by_batch: Arrays
    sums: Arrays


def joined(ranks: list[Answer]) -> Answer:
    """The answer of all ranks."""
    by_batch = {
        name: np.stack([rank.by_batch[name] for rank in ranks], 1).reshape(-1, *first.shape[1:])
        for name, first in ranks[0].by_batch.items()
    }
    names = dict.fromkeys(name for rank in ranks for name in rank.sums)
    return Answer(by_batch, {name: sum(rank.sums[name] for rank in ranks if name in rank.sums) for name in names})


def megatron_names(ours: Arrays) -> Arrays:
    """The tensors of our layer of experts by megatron-core's names, with global numbers of experts."""
    left = {name.removeprefix("layers.0."): numbers for name, numbers in ours.items()}
    found = {"router.weight": left.pop("router.weight")}
    up, down = left.pop("experts.gate_up.weight"), left.pop("experts.down.weight")
    for expert in range(len(up)):
        found[f"experts.local_experts.{expert}.linear_fc1.weight"] = up[expert].reshape(-1, up.shape[-1])
        found[f"experts.local_experts.{expert}.linear_fc2.weight"] = down[expert]
    if "shared.up.weight" in left:
        fused = [left.pop("shared.gate.weight"), left.pop("shared.up.weight")]
        found["shared_experts.linear_fc1.weight"] = np.concatenate(fused)
        found["shared_experts.linear_fc2.weight"] = left.pop("shared.down.weight")
        found["shared_experts.gate_weight"] = left.pop("shared_gate.weight")
    assert not left, f"megatron-core has no name for {list(left)}"
    return found


def without_streams() -> None:
    """On a CPU there is one stream, and every size is on the host."""
    without_gpu()
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: None))
    torch.cuda.Stream = torch.cuda.current_stream = lambda: stream
    torch.cuda.stream = lambda _: nullcontext()
    torch.compile = lambda function: function  # takes seconds, of small functions
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None  # a name of Transformer Engine, which is read where it is not installed too
    token_dispatcher.maybe_move_tensor_to_cpu = _as_after_the_copy


def _as_after_the_copy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """A copy from a GPU would turn the sizes of an all-to-all into numpy's."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def answers(rank: Rank, tasks: dict[str, Task]) -> dict[tuple[str, str], Answer]:
    """What the layer computes on this rank, by task and dispatcher, with all ranks as one expert-parallel group."""
    warnings.simplefilter("ignore")  # about what is not installed
    without_streams()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=rank.world_size)
    return {
        (name, dispatcher): run(build(task, dispatcher, rank.world_size), task, rank)
        for name, task in tasks.items()
        for dispatcher in DISPATCHERS
    }


def build(task: Task, dispatcher: str, ep: int) -> Any:
    """The layer with the weights of the task."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = task.model
    config = TransformerConfig(
        num_layers=1,
        hidden_size=model["hidden_size"],
        num_attention_heads=model["num_heads"],
        ffn_hidden_size=model["ffn_size"],
        num_moe_experts=model["experts"],
        moe_router_topk=model["experts_per_token"],
        moe_ffn_hidden_size=model["expert_ffn_size"],
        moe_shared_expert_intermediate_size=model.get("shared_ffn_size"),
        moe_shared_expert_gate=model.get("shared_gate", False),
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=ep,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        **task.settings,
    )
    layer = build_module(get_moe_module_spec(use_te=False, num_experts=model["experts"]), config=config)
    layer.set_layer_number(1)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(torch.from_numpy(task.weights[global_name(name, layer)]))
    if task.bias is not None:
        layer.router.expert_bias.copy_(torch.from_numpy(task.bias))
    return layer


def global_name(name: str, layer: Any) -> str:
    """The name with the global number of the expert."""
    words = name.split(".")
    if "local_experts" in words:
        words[2] = str(layer.local_expert_indices[int(words[2])])
    return ".".join(words)


def run(layer: Any, task: Task, rank: Rank) -> Answer:
    """Forward and backward of this rank's micro-batches."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker

    # `dy` belongs to a sum over tokens. `calculate_per_token_loss` would do the same, but for `seq_aux_loss`, which it
    # multiplies by the tokens of one sequence
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(float(task.x[0, ..., 0].size)))
    logged = get_moe_layer_wise_logging_tracker()

    found: dict[str, list[Array]] = {name: [] for name in ("probabilities", "choices", "output", "gradient of input")}
    for x, dy in zip(task.x[rank.rank :: rank.world_size], task.dy[rank.rank :: rank.world_size], strict=True):
        leaf = torch.from_numpy(x).requires_grad_()
        with torch.no_grad():
            probabilities, choices = layer.router(leaf)
        output, _ = layer(leaf)
        output.backward(torch.from_numpy(dy))
        assert leaf.grad is not None
        values = probabilities, choices, output.detach(), leaf.grad
        for into, value in zip(found.values(), values, strict=True):
            into.append(value.numpy())
    sums = {f"gradient/{global_name(name, layer)}": value.grad.numpy() for name, value in layer.named_parameters()}
    sums |= {LOSSES[name]: entry["values"][0].numpy() / len(task.x) for name, entry in logged.items()}
    logged.clear()
    if task.bias is not None:
        sums["counts"] = layer.router.local_tokens_per_expert.numpy()
    return Answer({name: np.stack(values) for name, values in found.items()}, sums)


LOSSES = {"load_balancing_loss": "balance", "seq_load_balancing_loss": "balance", "z_loss": "z"}
"""Our names of the losses of routers."""
