"""A run built from its configuration, without room for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.account.parameters import parameter_count
from megascale.comm.mesh import single
from megascale.config.explain import load
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.device import detect
from megascale.layout.chunks import chunk_buckets
from megascale.layout.tensors import padded_vocab
from megascale.model.parts import Operators
from megascale.model.transformer import Stage
from megascale.ops.select import Setting
from megascale.parallel.eight_bit import Scaling
from megascale.parallel.gradients import Gradients
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.rng import Dropout
from megascale.train.build import build_stages, mesh_of, number_formats
from tests.runs import LLAMA, config_of, settings
from tests.worlds import run_world

CONFIG = Path(__file__).parents[2] / "configs" / "gpu" / "gpt3-175b.toml"
ONE_RANK = ("tp=1", "sp=false", "pp=1", "vpp=1", "dp=1")


def on_meta(config: RunConfig) -> tuple[Stage, Gradients]:
    mesh, device = single(), torch.device("meta")
    gradients = Gradients(
        chunk_buckets(config, 0),
        mesh,
        zero=config.parallel.zero,
        sequence=False,
        overlap=True,
        formats=number_formats(config),
        device=device,
    )
    setting = Setting(config.model, config.backends, torch.bfloat16, detect(allow_gpu=False))
    (stage,) = build_stages(
        config, mesh, gradients, TensorAxis(mesh.tp), Operators.of(setting), Scaling(config, mesh, device)
    )
    return stage, gradients


def test_a_model_is_built_and_run_on_meta() -> None:
    """175 billion parameters, 700 GB of gradients: one process, no memory, a forward and a backward."""
    config = load(str(CONFIG), [*(f"parallel.{setting}" for setting in ONE_RANK), "data.mock=true"])
    stage, gradients = on_meta(config)
    model = config.model
    parameters = list(stage.parameters())
    assert all(parameter.is_meta for parameter in parameters)
    padding = (padded_vocab(model, 1) - model.vocab_size) * model.hidden_size
    assert sum(parameter.numel() for parameter in parameters) == parameter_count(model) + padding
    assert sum(bucket.bytes["gradients"] for bucket in gradients.buckets) > 4 * parameter_count(model)

    ids = torch.zeros(model.seq_length, 1, dtype=torch.int64, device="meta")
    loss = stage(None, MicroBatch(ids, ids, None, Dropout(0.0, 0, [0], torch.device("cpu"))))
    assert loss.is_meta and loss.shape == ()
    loss.backward()


def connected(rank: Rank, config: Any) -> set[tuple[str, str, int]]:
    """The messages of a mesh that has just been opened: direction, kind and the other rank."""
    mesh = mesh_of(config, rank, detect(allow_gpu=False))
    return {(event.group, event.name, event.peer) for event in mesh.recorder.events() if event.name in KINDS}


KINDS = ("send", "receive")


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_mesh_comes_with_its_channels_connected(vpp: int, tmp_path: Path) -> None:
    """Those of the first and the last stage too, where the last sends to the first one's second chunk."""
    layout = {"model__num_layers": 6, "parallel__pp": 3, "parallel__vpp": vpp, "batch__global": 6}
    config = config_of(settings(LLAMA, tmp_path, **layout), tmp_path, world=3)
    first, middle, last = run_world(3, connected, config)
    near = {("pp.up", "send", 1), ("pp.down", "receive", 1)}
    far = {("pp.up", "send", 2), ("pp.down", "receive", 2)} if vpp > 1 else set()
    assert first == near | far
    assert len(middle) == 4 and len(last) == len(first)
