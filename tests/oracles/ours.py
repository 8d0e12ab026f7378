"""Our side of a comparison: given weights by global name and a batch, the logits, the loss and every gradient, in any
layout. Numbers travel between processes as numpy arrays by global tensor name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale.config.run import RunConfig
from megascale.convert.tensor_map import bias_names
from megascale.core.rank import Rank
from megascale.data.mix.loader import BatchShape, Loader
from megascale.data.mix.samples import Sample, SampleSource
from megascale.layout.parameters import all_params
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.train.run import Run
from tests.logits import logits_of
from tests.runs import GPT, LLAMA, build_run, config_of, settings, total_of, train_order
from tests.worlds import run_world

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
"""Arrays by global tensor name."""

Piece = tuple[str, tuple[slice, ...], Array]
"""A box of a tensor: name, place, numbers."""

SEQUENCE, VOCABULARY, SAMPLES = 16, 101, 4

MODELS: dict[str, dict[str, Any]] = {
    "gpt gelu_tanh tied": GPT | {"activation": "gelu_tanh"},
    "gpt gelu untied": GPT | {"activation": "gelu", "tie_embeddings": False},
    "gpt gelu tied": GPT | {"activation": "gelu"},
    "llama untied": LLAMA | {"rope_theta": 500.0},
    "llama window": LLAMA | {"rope_theta": 500.0, "window": 5},
    "llama tied": LLAMA | {"rope_theta": 500.0, "tie_embeddings": True},
}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2": {"parallel__tp": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "pp2": {"parallel__pp": 2},
    "tp2 sp pp2 vpp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
}


class Batch(SampleSource):
    """The same samples for both sides: each position predicts the next one, and some labels do not count, the last of
    each sample among them.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE), generator=generator)
        self.labels = self.tokens.roll(-1, 1)
        self.mask = torch.ones(SAMPLES, SEQUENCE)
        self.mask[:, -1] = 0
        self.mask[1, 3:7] = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        ids = torch.cat([self.tokens[index], self.labels[index, -1:]])
        return Sample(ids.numpy(), self.mask[index].numpy())


class Result:
    """What a model computed: logits [b, s, vocabulary], None in a pipeline; the loss, a sum over tokens; gradients."""

    def __init__(self, logits: Array | None, loss: float, gradients: Arrays) -> None:
        self.logits, self.loss, self.gradients = logits, loss, gradients


def compute(model: dict[str, Any], weights: Arrays, folder: Path, precision: str, **layout: Any) -> Result:
    """The loss of `Batch` and its gradients in a world of real processes, in two micro-batches. `weights`: also the
    biases of experts, by layer.
    """
    tree = settings(model, folder, batch__micro=2, batch__global=SAMPLES, train__precision=precision, **layout)
    config = config_of(tree, folder)
    shapes = {tensor.name: tensor.shape for parameter in all_params(config.model) for tensor in parameter.parts}
    biases = {name: weights[name] for name in weights.keys() - shapes.keys()}
    assert biases.keys() == set(bias_names(config.model).values())
    assert {name: weights[name].shape for name in shapes} == shapes
    pieces = run_world(config.world_size, _on_rank, config, weights)
    losses = {loss for _, loss, _ in pieces}
    assert len(losses) == 1, "ranks disagree about the loss"
    logits = None
    if config.parallel.pp == 1:
        logits = np.concatenate([logits for logits, _, _ in pieces], -1)[..., :VOCABULARY]
    return Result(logits, losses.pop(), join(shapes, [gradients for _, _, gradients in pieces]))


def difference(ours: Result, theirs: Result) -> dict[str, float]:
    """The largest difference of logits, of the loss, and of each gradient, relative to the largest number there.

    A bias is measured against its weight's gradient if that is larger: with the bias of keys, which shifts all scores
    of a query alike, the exact gradient is zero.
    """
    found = {"loss": abs(ours.loss - theirs.loss) / abs(theirs.loss)}
    if ours.logits is not None:
        found["logits"] = float(np.abs(ours.logits - theirs.logits).max() / np.abs(theirs.logits).max())
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, theirs_g in theirs.gradients.items():
        assert ours.gradients[name].shape == theirs_g.shape, name
        layer = name.removesuffix(".bias")
        scale = max(np.abs(theirs.gradients[key]).max() for key in {name, f"{layer}.weight" if layer != name else name})
        found[name] = float(np.abs(ours.gradients[name] - theirs_g).max() / scale)
    return found


def _on_rank(rank: Rank, config: RunConfig, weights: Arrays) -> tuple[Array | None, float, list[Piece]]:
    """Logits that this rank holds, the whole loss, and this rank's boxes of gradients."""
    run: Run = build_run(rank, config)
    for target, _, parameter in parameters_of(run):
        for tensor, box, rows in boxes_of(parameter, run.mesh):
            with torch.no_grad():
                target[rows] = torch.from_numpy(weights[tensor.name][box])

    for layer, name in bias_names(config.model).items():
        for stage in run.stages:
            if str(layer) in stage.layers:
                stage.layers[str(layer)].mlp._experts.bias[layer] = torch.from_numpy(weights[name])

    shape = BatchShape(SAMPLES, config.batch.micro, config.dp)
    batch = Loader(Batch(), shape, 0, dropout=0.0, seed=0, device=run.device.torch_device).batch(0)
    run.buffers.begin_step()
    loss = total_of(run, run.pipeline.run_actions(train_order(run), batch))
    list(run.buffers.finish_reductions())

    found = []
    for _, grad, parameter in parameters_of(run):
        assert grad.isfinite().all()
        for tensor, box, rows in boxes_of(parameter, run.mesh):
            found.append((tensor.name, box, grad[rows].double().clone().numpy()))
            grad[rows] = 0
        assert not grad.any(), f"padding of {parameter.name} has a gradient"
    return _logits(run, batch), loss, found


def _logits(run: Run, batch: Any) -> Array | None:
    """This rank's columns of the logits, [b, s, rows of the vocabulary]."""
    if run.mesh.topology.pp > 1:
        return None
    (stage,) = run.stages
    parts = [logits_of(stage, batch.micro_batches[index]) for index in range(run.config.num_microbatches)]
    return torch.cat(parts, 1).transpose(0, 1).double().numpy()


def parameters_of(run: Run) -> Any:
    """Each parameter of this rank: weights, their gradient, and what it is."""
    for bucket in run.buffers.buckets:
        for slot in bucket.layout.slots:
            target = bucket.parameters[slot.parameter.name]
            yield target, bucket.grad[slot.start : slot.stop].view(target.shape), slot.parameter


def boxes_of(parameter: ParamSpec, mesh: Any) -> list[tuple[TensorSpec, tuple[slice, ...], slice]]:
    """The tensors of a parameter: the box that this rank holds, and the rows of the parameter that are this box."""
    found, row = [], 0
    for tensor in parameter.parts:
        offset, size = tensor.local_box(mesh.topology, mesh.coord)
        box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        found.append((tensor, box, slice(row, row + size[0])))
        row += size[0]
    return found


def join(shapes: dict[str, tuple[int, ...]], ranks: list[list[Piece]]) -> Arrays:
    """Whole tensors from the boxes of all ranks. Every number must be there, and copies must agree to the bit."""
    full = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    for name, box, numbers in (piece for rank in ranks for piece in rank):
        there = full[name][box]
        assert ((there == numbers) | np.isnan(there)).all(), f"ranks disagree about {name}"
        full[name][box] = numbers
    missing = [name for name, numbers in full.items() if np.isnan(numbers).any()]
    assert not missing, f"no rank holds all of {missing}"
    return full
