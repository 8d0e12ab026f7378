"""Small runs for tests: configurations, built runs and their training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.config.backends import BackendsConfig
from megascale.config.loading import load_config
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.config.toml_writer import to_toml
from megascale.core.rank import Rank
from megascale.layout.chunks import shares_embedding
from tests.recorded_events import recorded_events

GPT = {
    "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 101, "seq_length": 16,
}  # fmt: skip
LLAMA = GPT | {
    "num_kv_heads": 2, "ffn_size": 48, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False,
    "tie_embeddings": False,
}  # fmt: skip
MLA = LLAMA | {
    "num_kv_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 16, "rope_head_dim": 4, "value_head_dim": 6,
}  # fmt: skip
FAMILIES = {"gpt": GPT, "llama": LLAMA}
GEMMA2 = LLAMA | {
    "block": "sandwich", "norm": "rmsnorm_1p", "activation": "geglu", "embedding_scale": 32**0.5, "logit_softcap": 3.0,
    "tie_embeddings": True,
}  # fmt: skip
OLMO2 = LLAMA | {"block": "post_norm"}
NEOX = GPT | {"block": "parallel_two_norms", "position": "rope", "tie_embeddings": False}
MODELS = FAMILIES | {"gemma2": GEMMA2, "olmo2": OLMO2, "neox": NEOX, "mla": MLA}


def settings(model: dict[str, Any], folder: Path, **overrides: Any) -> dict[str, Any]:
    """Return a complete configuration: `model` on mock data, 8 samples a step, with `section__key=value` overrides."""
    tree: dict[str, Any] = {
        "name": "test",
        "output_dir": str(folder),
        "model": dict(model),
        "batch": {"micro": 1, "global": 8},
        "train": {"steps": 10, "precision": "fp64", "log_every": 1},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
        "observe": {"tensorboard": False, "event_store": False},
    }
    for name, value in overrides.items():
        section, _, key = name.rpartition("__")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    return tree


def write_config(tree: dict[str, Any], path: Path) -> Path:
    """Write a configuration file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(toml(tree))
    return path


def toml(tree: dict[str, Any]) -> str:
    """Format a tree of settings as TOML."""
    import json

    def formatted(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {formatted(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            return "[" + ", ".join(map(formatted, value)) + "]"
        return json.dumps(value)

    lines = [f"{key} = {formatted(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for table, keys in tree.items():
        if isinstance(keys, dict):
            lines += [f"[{table}]", *(f"{key} = {formatted(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def config_of(tree: dict[str, Any], folder: Path, overrides: Sequence[str] = (), world: int | None = None) -> RunConfig:
    """Return a checked and resolved configuration."""
    path = write_config(tree, folder / "config-in.toml")
    return load_config(str(path), overrides, world)


def given(model: ModelConfig, parameters: dict[str, Any], **backends: str) -> Any:
    """Return the layer context of a single process, on the CPU in fp64."""
    import torch

    from megascale.comm.group import single_rank_group
    from megascale.device import detect_device
    from megascale.model.layer_ops import LayerOps
    from megascale.model.modules import LayerContext
    from megascale.ops.select import OpContext
    from megascale.parallel.tp_overlap import TensorParallel

    setting = OpContext(model, BackendsConfig(**backends), torch.float64, detect_device(allow_gpu=False))
    return LayerContext(model, parameters, TensorParallel(single_rank_group("tp")), LayerOps.from_context(setting))


def micro_batch(samples: Sequence[int], **more: Any) -> Any:
    """Return a micro-batch of the samples of these numbers, without tokens."""
    import torch

    from megascale.parallel.microbatch import MicroBatch
    from megascale.parallel.rng import Dropout

    return MicroBatch(None, None, None, Dropout(0.0, 0, samples, torch.device("cpu")), **more)


def build_run(rank: Rank, config: RunConfig, mesh: Any = None, *, gpu: bool = False) -> Any:
    """Build a run on this rank, on the CPU or its GPU. `mesh`: the open mesh of a run of the same layout, which may
    have tied embeddings where this one has none.
    """
    from megascale.comm.group import single_rank_group
    from megascale.device import detect_device
    from megascale.train.build import build_mesh, build_rank_run
    from megascale.train.stop import StopRequest

    device = detect_device(rank.local_rank, allow_gpu=gpu)
    mesh = mesh or build_mesh(config, rank, device)
    if not shares_embedding(config.model, config.parallel):  # the ends of the pipeline share no embedding
        mesh = replace(mesh, tied=single_rank_group("tied", rank.rank))
    return build_rank_run(config, mesh, device, StopRequest())


def train_curve(rank: Rank, config: RunConfig, steps: int | None = None) -> list[tuple[float, float]]:
    """Train and return (loss, gradient norm) of each step."""
    return curve_of(build_run(rank, config), steps or config.train.steps)


def builds(rank: Rank, configs: Sequence[RunConfig]) -> Iterator[Any]:
    """Build runs of the same layout in turn, on the mesh of the first."""
    mesh = None
    for config in configs:
        run = build_run(rank, config, mesh)
        mesh = mesh or run.mesh
        yield run


def traffic_of(run: Any, step: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Return (calls, bytes) of a step by group and operation, from the event log."""
    traffic: dict[str, dict[str, tuple[int, int]]] = {group.name: {} for group in run.mesh.groups}
    for event in recorded_events(run.mesh.recorder):
        if event.group and event.step == step:
            calls, size = traffic[event.group].get(event.name, (0, 0))
            traffic[event.group][event.name] = (calls + 1, size + event.bytes)
    return traffic


def send_messages(group: Any, *, backend: bool = False, timeout: Any = None) -> None:
    """Let a group on a single host communicate as over several hosts: by short point-to-point messages, or with
    `backend` by the backend's collectives.
    """
    from megascale.comm.open_group import ProcessGroupTransport
    from megascale.comm.p2p_collectives import P2PTransport
    from megascale.comm.progress import work_wrapper

    if group.size > 1 and group.transport is not None:
        wrap_work = work_wrapper(group.name, group.recorder.timer, None if backend else timeout)
        group.p2p_transport = P2PTransport(
            group.process_group, group.ranks, group.index, wrap_work, max_message_bytes=2000
        )
        group.message_transport = group.p2p_transport
        group.transport = ProcessGroupTransport(group.process_group, wrap_work) if backend else group.p2p_transport


def scale_and_clip(run: Any, tokens: float = 1.0) -> float:
    """Clip all gradients (sums over `tokens`) as a step does; return the norm before clipping."""
    import torch

    from megascale.comm.totals import sum_over_job

    square = torch.zeros((), dtype=torch.float64)
    for bucket in run.buffers.buckets:
        square += run.optimizer.local_sq_norm(bucket)
    sum_over_job(run.mesh, square)
    one = torch.ones((), dtype=torch.float64)
    clipping = run.optimizer.compute_clipping(square, tokens * one, loss=one)
    for index in range(len(run.buffers.buckets)):
        grad = run.optimizer.shards[index].bucket.grad
        grad.mul_(clipping.grad_factor.to(grad.dtype))
    return float(clipping.norm)


def gather_weights(run: Any) -> None:
    """All-gather the parameters that the ranks have updated."""
    for bucket in run.buffers.buckets:
        run.buffers.start_param_gather(bucket)
    run.buffers.finish_param_gather()


def total_of(run: Any, part: Any) -> float:
    """Sum a total over micro-batches, such as the loss, over all ranks."""
    from megascale.train.step_totals import StepTotals

    totals = StepTotals(run.mesh, run.device.torch_device)
    totals.add_per_microbatch(total=part)
    return float(totals.reduce()["total"])


def curve_of(run: Any, steps: int) -> list[tuple[float, float]]:
    """Train a built run for `steps` steps and return (loss, gradient norm) of each."""
    from megascale.train.step import train_step

    curve = []
    for _ in range(steps):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        curve.append((result.loss, result.grad_norm))
    run.buffers.finish_param_gather()
    return curve


__all__ = ["FAMILIES", "GPT", "LLAMA", "build_run", "config_of", "settings", "to_toml", "train_curve", "write_config"]


def train_order(run: Any) -> Any:
    """Return the actions of a step of the whole batch."""
    return run.order_of(run.config.num_microbatches, True)


def valid_order(run: Any) -> Any:
    """Return the actions of an evaluation of one global batch."""
    return run.order_of(run.config.num_microbatches, False)
