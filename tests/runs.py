"""Small runs for tests: configurations in memory, and what a rank does with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megascale.config.backends import BackendsConfig
from megascale.config.explain import load
from megascale.config.model import ModelConfig
from megascale.config.resolved import to_toml
from megascale.config.run import RunConfig
from megascale.core.rank import Rank

GPT = {
    "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 101, "seq_length": 16,
}  # fmt: skip
LLAMA = GPT | {
    "num_kv_heads": 2, "ffn_size": 48, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False,
    "tie_embeddings": False,
}  # fmt: skip
FAMILIES = {"gpt": GPT, "llama": LLAMA}


def settings(model: dict[str, Any], folder: Path, **overrides: Any) -> dict[str, Any]:
    """A whole configuration: `model` on mock data, 8 samples a step, with `section__key=value` overrides."""
    tree: dict[str, Any] = {
        "name": "test",
        "model": dict(model),
        "batch": {"micro": 1, "global": 8},
        "train": {"steps": 10, "precision": "fp64", "log_every": 1},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
        "observe": {"dir": str(folder), "tensorboard": False},
    }
    for name, value in overrides.items():
        section, _, key = name.partition("__")
        tree.setdefault(section, {})[key] = value
    return tree


def write_config(tree: dict[str, Any], path: Path) -> Path:
    """A configuration as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(toml(tree))
    return path


def toml(tree: dict[str, Any]) -> str:
    """A tree of settings as TOML."""
    import json

    lines = [f"{key} = {json.dumps(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for table, keys in tree.items():
        if isinstance(keys, dict):
            lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def config_of(tree: dict[str, Any], folder: Path, overrides: Sequence[str] = (), world: int | None = None) -> RunConfig:
    """A checked and resolved configuration."""
    path = write_config(tree, folder / "config-in.toml")
    return load(str(path), overrides, world)


def given(model: ModelConfig, parameters: dict[str, Any], **backends: str) -> Any:
    """What the network of one process is made of, on the CPU in fp64."""
    import torch

    from megascale.comm.group import alone
    from megascale.device import detect
    from megascale.model.parts import Given, Operators
    from megascale.ops.select import Setting
    from megascale.parallel.overlap import TensorAxis

    setting = Setting(model, BackendsConfig(**backends), torch.float64, detect(allow_gpu=False))
    return Given(model, parameters, TensorAxis(alone("tp")), Operators.of(setting))


def build_run(rank: Rank, config: RunConfig, mesh: Any = None, *, gpu: bool = False) -> Any:
    """A built run on this rank, on the CPU or its GPU; on `mesh` if a run of the same layout has opened one before."""
    from megascale.device import detect
    from megascale.train.build import build, mesh_of
    from megascale.train.stop import Stop

    device = detect(rank.local, allow_gpu=gpu)
    return build(config, mesh or mesh_of(config, rank, device), device, Stop())


def train_curve(rank: Rank, config: RunConfig, steps: int | None = None) -> list[tuple[float, float]]:
    """Train and return (loss, gradient norm) of each step."""
    return curve_of(build_run(rank, config), steps or config.train.steps)


def builds(rank: Rank, configs: Sequence[RunConfig]) -> Iterator[Any]:
    """Runs of one layout, built one after the other on the mesh of the first."""
    mesh = None
    for config in configs:
        run = build_run(rank, config, mesh)
        mesh = run.mesh
        yield run


def traffic_of(run: Any, step: int) -> dict[str, dict[str, tuple[int, int]]]:
    """(calls, bytes) by group and operation in one step, from the ledger."""
    found: dict[str, dict[str, tuple[int, int]]] = {group.name: {} for group in run.mesh.groups}
    for event in run.mesh.recorder.events():
        if event.group and event.step == step:
            calls, size = found[event.group].get(event.name, (0, 0))
            found[event.group][event.name] = (calls + 1, size + event.bytes)
    return found


def send_messages(group: Any, *, backend: bool = False, timeout: Any = None) -> None:
    """Let a group on one host communicate as if its ranks were on several: by direct messages, short ones, or by the
    `backend`'s own collectives.
    """
    from megascale.comm.backend import Backend
    from megascale.comm.exchange import Exchange
    from megascale.comm.progress import follower

    if group.size > 1 and group.transport is not None:
        follow = follower(group.name, group.recorder.timer, None if backend else timeout)
        group.exchange = Exchange(group.process_group, group.ranks, group.index, follow, most=2000)
        group.transport = Backend(group.process_group, follow) if backend else group.exchange


def scale_and_clip(run: Any, tokens: float = 1.0) -> float:
    """Clip all gradients, sums over `tokens`, as a step does; returns the norm before."""
    import torch

    from megascale.comm.totals import sum_over_job

    square = torch.zeros((), dtype=torch.float64)
    for bucket in run.gradients.buckets:
        square += run.optimizer.square(bucket)
    sum_over_job(run.mesh, square)
    one = torch.ones((), dtype=torch.float64)
    clipping = run.optimizer.clipping(square, tokens * one, loss=one)
    for index in range(len(run.gradients.buckets)):
        run.optimizer.clip(index, clipping)
    return float(clipping.norm)


def gather_weights(run: Any) -> None:
    """Collect the weights that every rank has updated."""
    for bucket in run.gradients.buckets:
        run.gradients.start_gather(bucket)
    run.gradients.finish_gather()


def curve_of(run: Any, steps: int) -> list[tuple[float, float]]:
    """Train a built run for some steps and return (loss, gradient norm) of each."""
    from megascale.train.step import train_step

    curve = []
    for _ in range(steps):
        result = train_step(run, run.train.batch(run.progress.samples))
        curve.append((result.loss, result.grad_norm))
    run.gradients.finish_gather()
    return curve


__all__ = ["FAMILIES", "GPT", "LLAMA", "build_run", "config_of", "settings", "to_toml", "train_curve", "write_config"]
