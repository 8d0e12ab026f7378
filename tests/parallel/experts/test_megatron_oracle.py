"""The same weights and tokens give the same choices, outputs, losses and gradients as megatron-core's layer of experts:
on one process, and with experts on two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.parameters import all_params
from megascale.layout.tensors import TensorSpec
from megascale.parallel.experts.grouped_linear import router_logits
from megascale.parallel.microbatch import MicroBatch
from tests.marks import only_quick
from tests.oracles.ours import Array, Arrays, Piece, boxes_of, join, parameters_of
from tests.parallel.experts.megatron_layer import DISPATCHERS, Answer, Task, answers, joined, megatron_names
from tests.runs import LLAMA, build_run, config_of, settings
from tests.worlds import run_world

MICRO, BATCHES = 2, 4

MIXTRAL = LLAMA | {"num_layers": 1, "experts": 8, "experts_per_token": 2, "expert_ffn_size": 24}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({}, {}, {}),
    "weights without a sum of 1": (
        {"router_normalize": False, "router_scale": 1.5},
        {},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
    ),
    "balance of micro-batches": (
        {},
        {"moe__balance": "group", "moe__balance_group": MICRO, "moe__balance_weight": 0.5, "moe__z_loss_weight": 0.1},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1},
    ),
    "balance of sequences": (
        {"router_score": "sigmoid", "shared_ffn_size": 16, "shared_gate": True},
        {"moe__balance": "sequence", "moe__balance_weight": 0.5},
        {
            "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5,
            "moe_router_score_function": "sigmoid",
        },
    ),
    "deepseek v2": (
        {"experts_per_token": 3, "router_normalize": False, "router_groups": 4, "router_top_groups": 2},
        {"moe__balance": "sequence", "moe__balance_weight": 0.5},
        {
            "moe_router_pre_softmax": True, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
            "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5,
        },
    ),
    "deepseek v3": (
        {
            "experts": 16, "experts_per_token": 4, "router_score": "sigmoid", "balance_bias": True,
            "router_groups": 4, "router_top_groups": 2, "router_group_value": "top2", "router_scale": 2.5,
        },
        {"moe__balance": "group", "moe__balance_group": MICRO, "moe__balance_weight": 0.5},
        {
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 4,
            "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5,
            "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5,
        },
    ),
}  # fmt: skip
"""By name: changes of our model, our `[moe]`, and megatron-core's settings."""

LAYER = ("layers.0.router.", "layers.0.experts.", "layers.0.shared")
"""The beginnings of names in a layer of experts."""


def configuration(name: str, folder: Path, dp: int) -> RunConfig:
    model, moe, _ = CASES[name]
    changes = {"train__precision": "fp32", "batch__micro": MICRO, "batch__global": MICRO * BATCHES} | moe
    changes |= {"parallel__dp": dp, "parallel__ep": dp, "parallel__zero": 0}
    return config_of(settings(MIXTRAL | model, folder, **changes), folder)


def task_of(name: str, config: RunConfig) -> tuple[Task, Arrays]:
    """Tokens, and weights far from where training starts, by megatron-core's names and by ours."""
    draw, model = np.random.default_rng(7), config.model
    shape = BATCHES, model.seq_length, MICRO, model.hidden_size
    x, dy = draw.normal(size=(2, *shape)).astype(np.float32)
    weights = {tensor: (0.2 * draw.normal(size=size)).astype(np.float32) for tensor, size in shapes_of(config).items()}
    bias = (0.1 * draw.normal(size=model.experts)).astype(np.float32) if model.balance_bias else None
    return Task(MIXTRAL | CASES[name][0], CASES[name][2], x, dy, megatron_names(weights), bias), weights


def shapes_of(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of the layer of experts."""
    parts = (tensor for parameter in all_params(config.model) for tensor in parameter.parts)
    return {tensor.name: tensor.shape for tensor in parts if tensor.name.startswith(LAYER)}


def ours_on_rank(rank: Rank, configs: dict[str, RunConfig]) -> dict[str, tuple[Answer, list[Piece]]]:
    """What our layer computes on this rank, by case."""
    mesh, found = None, {}
    for name, config in configs.items():
        run = build_run(rank, config, mesh)
        mesh, (task, weights) = run.mesh, task_of(name, config)
        fill(run, task, weights)
        answer, parameters = compute(run, task), layer_parameters(run)
        found[name] = answer, [(tensor.name, box, grad[rows].numpy()) for _, grad, tensor, box, rows in parameters]
    return found


def layer_parameters(run: Any) -> Iterator[tuple[Any, Any, TensorSpec, tuple[slice, ...], slice]]:
    """Weights and gradients of this rank's parameters: of each tensor in them its box, and the rows there."""
    for target, grad, parameter in parameters_of(run):
        for tensor, box, rows in boxes_of(parameter, run.mesh):
            if tensor.name.startswith(LAYER):
                yield target, grad, tensor, box, rows


def fill(run: Any, task: Task, weights: Arrays) -> None:
    """Replace the layer's initial weights, and the bias of its experts."""
    for target, _, tensor, box, rows in layer_parameters(run):
        target.data[rows] = torch.from_numpy(weights[tensor.name][box])
    if task.bias is not None:
        run.stages[0].layers["0"].mlp._experts.bias[0] = torch.from_numpy(task.bias)


def compute(run: Any, task: Task) -> Answer:
    """Forward and backward of this rank's micro-batches, and the reduction of gradients over all ranks."""
    batch, by_batch, sums = run.train_loader.batch(0), [], Counter[str]()
    run.buffers.begin_step()
    run.step_hooks.batch_read(run, batch)
    for index, micro_batch in enumerate(batch.micro_batches):
        at = index * run.mesh.topology.dp + run.mesh.coord.dp
        with run.buffers.backward(0, last=index == len(batch.micro_batches) - 1):
            by_batch.append(forward_and_backward(run.stages[0].layers["0"].mlp, micro_batch, task.x[at], task.dy[at]))
        choice = micro_batch.expert_choices[0]
        counts = {} if task.bias is None else {"counts": choice.counts}  # megatron-core counts for the bias alone
        for key, value in (choice.losses | counts).items():
            sums[key] += value.numpy()
    run.buffers.start_chunk_reduction(0)
    list(run.buffers.finish_reductions())
    return Answer({name: np.stack([each[name] for each in by_batch]) for name in by_batch[0]}, dict(sums))


def forward_and_backward(layer: Any, batch: MicroBatch, x: Array, dy: Array) -> Arrays:
    leaf = torch.from_numpy(x.copy()).requires_grad_()
    output = layer(leaf, batch)
    output.backward(torch.from_numpy(dy.copy()))
    with torch.no_grad():
        logits = router_logits(leaf.flatten(0, 1), layer.router)
        weights, _ = layer._experts.route(logits, batch, 0)
    chosen = batch.expert_choices[0].experts
    assert leaf.grad is not None and chosen is not None
    return {
        "probabilities": torch.zeros_like(logits).scatter_(1, chosen, weights).numpy(),
        "choices": torch.zeros_like(logits).scatter_(1, chosen, 1).bool().numpy(),
        "output": output.detach().numpy(),
        "gradient of input": leaf.grad.numpy(),
    }


@pytest.fixture(scope="module", params=only_quick([1, 2], 2), ids=["one process", "ep2"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """Our answer and theirs, by case and dispatcher."""
    folder, world = tmp_path_factory.mktemp("experts"), request.param
    configs = {name: configuration(name, folder, world) for name in CASES}
    tasks = {name: task_of(name, config)[0] for name, config in configs.items()}
    ours, theirs = run_world(world, ours_on_rank, configs), run_world(world, answers, tasks)
    found = {}
    for name, config in configs.items():
        answer = joined([rank[name][0] for rank in ours])
        gradients = megatron_names(join(shapes_of(config), [rank[name][1] for rank in ours]))
        answer.sums.update({f"gradient/{key}": value for key, value in gradients.items()})
        for dispatcher in DISPATCHERS:
            found[name, dispatcher] = answer, joined([rank[name, dispatcher] for rank in theirs])
    return found


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("name", CASES)
def test_fp32(name: str, dispatcher: str, both: dict[tuple[str, str], tuple[Answer, Answer]]) -> None:
    ours, theirs = both[name, dispatcher]
    assert np.array_equal(ours.by_batch["choices"], theirs.by_batch["choices"])
    assert ours.by_batch.keys() == theirs.by_batch.keys()
    assert ours.sums.keys() == theirs.sums.keys()
    differences = {key: difference(ours.by_batch[key], value) for key, value in theirs.by_batch.items()}
    differences |= {key: difference(ours.sums[key], value) for key, value in theirs.sums.items()}
    assert max(differences.values()) < 1e-5, differences


def difference(ours: Array, theirs: Array) -> float:
    """The largest difference, relative to the largest number there."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours.astype(np.float64) - theirs).max() / np.abs(theirs).max())
