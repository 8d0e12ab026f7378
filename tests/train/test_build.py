"""Construction of runs: a model on the meta device, a mesh with open connections, and what a GPU needs of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megascale.comm.mesh import single_process_mesh
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.device import detect_device
from megascale.layout.chunks import chunk_buckets, fp8_layers, stages_of
from megascale.layout.hybrid.plan import row_step
from megascale.layout.parameters import parameter_count
from megascale.layout.tensors import padded_vocab
from megascale.model.layer_ops import LayerOps
from megascale.model.modules import LayerContext
from megascale.model.transformer import Stage
from megascale.ops.select import OpContext
from megascale.parallel.fp8_state import Fp8State
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.param_and_grad_buffers import BucketCommunication, ParamAndGradBuffers
from megascale.parallel.rng import Dropout
from megascale.parallel.tp_overlap import TensorParallel
from megascale.train.build import build_mesh, build_stages, run_dtypes
from tests.recorded_events import recorded_events
from tests.runs import LLAMA, config_of, settings
from tests.worlds import run_world

CONFIG = Path(__file__).parents[2] / "configs" / "gpu" / "gpt3-175b.toml"
ONE_RANK = ("tp=1", "sp=false", "pp=1", "vpp=1", "dp=1")


def on_meta(config: RunConfig) -> tuple[Stage, ParamAndGradBuffers]:
    mesh, device = single_process_mesh(), torch.device("meta")
    buffers = ParamAndGradBuffers(
        chunk_buckets(config.model, config.parallel, config.overlap, config.train, 0),
        mesh,
        zero=config.parallel.zero,
        sequence=False,
        communication=BucketCommunication(overlap=True),
        dtypes=run_dtypes(config.train.precision),
        device=device,
    )
    context = OpContext(config.model, config.backends, torch.bfloat16, detect_device(allow_gpu=False))
    fp8_state = Fp8State(config.model, config.fp8, fp8_layers(config.model, config.train, config.fp8), mesh, device)
    layers = LayerContext(config.model, {}, TensorParallel(mesh.tp), LayerOps.from_context(context))
    (stage,) = build_stages(stages_of(config.model, config.parallel), 0, config.train, buffers, layers, fp8_state)
    return stage, buffers


def test_a_model_is_built_and_run_on_meta() -> None:
    """GPT-3 175B's first twelve layers, with 90 GB of gradients, on the meta device: one process, one forward, one
    backward.
    """
    overrides = [*(f"parallel.{setting}" for setting in ONE_RANK), "data.mock=true", "model.num_layers=12"]
    config = load_config(str(CONFIG), overrides)
    stage, buffers = on_meta(config)
    model = config.model
    parameters = list(stage.parameters())
    assert all(parameter.is_meta for parameter in parameters)
    padding = (padded_vocab(model, 1) - model.vocab_size) * model.hidden_size
    assert sum(parameter.numel() for parameter in parameters) == parameter_count(model) + padding
    assert sum(bucket.grad.untyped_storage().nbytes() for bucket in buffers.buckets) > 4 * parameter_count(model)

    ids = torch.zeros(model.seq_length, 1, dtype=torch.int64, device="meta")
    loss = stage(None, MicroBatch(ids, ids, None, Dropout(0.0, 0, [0], torch.device("cpu")))).loss
    assert loss.is_meta and loss.shape == ()
    loss.backward()


def warm_up_messages(rank: Rank, config: Any) -> set[tuple[str, str, int]]:
    """Warm-up messages of a new mesh: group, operation and peer."""
    mesh = build_mesh(config, rank, detect_device(allow_gpu=False))
    return {(event.group, event.name, event.peer) for event in recorded_events(mesh.recorder) if event.name in KINDS}


KINDS = ("send", "receive")


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_new_mesh_has_connected_its_pipeline_neighbours(vpp: int, tmp_path: Path) -> None:
    """With vpp > 1 the last stage also connects to the first stage's second chunk."""
    layout = {"model__num_layers": 6, "parallel__pp": 3, "parallel__vpp": vpp, "batch__global": 6}
    config = config_of(settings(LLAMA, tmp_path, **layout), tmp_path, world=3)
    first, middle, last = run_world(3, warm_up_messages, config)
    near = {("pp.up", "send", 1), ("pp.down", "receive", 1)}
    far = {("pp.up", "send", 2), ("pp.down", "receive", 2)} if vpp > 1 else set()
    assert first == near | far
    assert len(middle) == 4 and len(last) == len(first)


ON_GPUS: dict[str, Any] = {
    "parallel__tp": 2, "parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 1, "parallel__hybrid_dp": True,
    "data__max_tokens_per_rank": 32, "data__attention_mask": "document", "nccl__pp_carveout": 4,
    "optimizer__name": "muon", "train__precision": "bf16",
}  # fmt: skip


def told_on_a_gpu(rank: Rank, config: RunConfig) -> tuple[list[tuple[int]], bool, int]:
    """What a fake GPU, its peers' memory, the warm-up and the loader are told when a run is built."""
    from megascale.comm import symmetric_memory
    from tests.fakegpu import FakeGPU, build_fake, open_device, watched

    with (
        watched(),
        patch.object(symmetric_memory, "can_map_peers", lambda group, device: True),
        patch.object(symmetric_memory.SymmetricMemory, "reserve") as reserve,
        patch.object(FakeGPU, "leave_sms") as leave_sms,
        patch("megascale.train.build.open_mesh"),
        patch("megascale.train.build.warm_up") as warm_up,
    ):
        build_mesh(config, rank, FakeGPU(open_device(), "nccl"))
        step = build_fake(config, 0).train_loader.pool.step
        bytes_and_sms = [called.args for mock in (reserve, leave_sms) for called in mock.call_args_list]
        return bytes_and_sms, bool(warm_up.call_args.kwargs["owners"]), step


def test_what_a_gpu_needs_is_done_before_the_first_step(tmp_path: Path) -> None:
    """Memory that peers map, SMs for messages, connections for matrices, and few numbers of rows."""
    config = config_of(settings(LLAMA, tmp_path, **ON_GPUS), tmp_path, world=8)
    ((bytes_and_sms, matrices, step),) = run_world(1, told_on_a_gpu, config)
    part = 32 * config.model.hidden_size * 2 // 2  # bytes of an activation in bf16, on each of two ranks
    assert bytes_and_sms == [(part,), (4,)]
    assert matrices
    assert step == row_step(32) > 1
