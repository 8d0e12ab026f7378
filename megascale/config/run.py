"""The whole configuration of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megascale.catalog.tokenizers import TOKENIZERS
from megascale.config.backends import BackendsConfig
from megascale.config.fp8 import Fp8Config
from megascale.config.launch import LaunchConfig
from megascale.config.model import ModelConfig
from megascale.config.nccl import NcclConfig
from megascale.config.parallel import OverlapConfig, ParallelConfig
from megascale.config.section import Section
from megascale.config.train import (
    BatchConfig,
    Blend,
    CheckpointConfig,
    DataConfig,
    ObserveConfig,
    OptimizerConfig,
    TrainConfig,
)
from megascale.core.files import expanded

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What can name a run, and so a folder."""


FOREIGN = "hf:"
"""Begins a `checkpoint.resume` that names a folder of Hugging Face's."""


class RunConfig(Section):
    """A run: its name and its sections. Frozen; `resolve` gives the values that follow from the number of processes."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")] = Field(description="names the run's folder")
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    overlap: OverlapConfig = OverlapConfig()
    batch: BatchConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    fp8: Fp8Config = Fp8Config()
    backends: BackendsConfig = BackendsConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LaunchConfig()
    nccl: NcclConfig = NcclConfig()

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.observe.dir) / self.name

    @property
    def checkpoints(self) -> str:
        """The folder of the run's checkpoints, a path or a URL."""
        parent = self.checkpoint.dir
        return str(self.folder / "checkpoints") if parent is None else f"{parent.rstrip('/')}/{self.name}"

    @property
    def dp(self) -> int:
        """Data-parallel ranks of a resolved configuration."""
        if not isinstance(self.parallel.dp, int):
            raise ValueError("parallel.dp is 'auto': resolve the configuration for a number of processes first")
        return self.parallel.dp

    @property
    def world(self) -> int:
        """Processes of a resolved configuration."""
        return replicas_of(self.parallel) * self.dp

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each data-parallel rank runs in a step."""
        return self.batch.total // (self.batch.micro * self.dp)

    def resolve(self, world: int | None) -> RunConfig:
        """A copy in which every default that depends on other keys, or on the number of processes, is a value.

        `world`: processes of the job, or None for the fewest that the layout needs.
        """
        p = self.parallel
        dp = p.dp if isinstance(p.dp, int) else (world or replicas_of(p)) // replicas_of(p)
        schedule = p.schedule or ("interleaved_1f1b" if p.vpp > 1 else "1f1b")
        parallel = p.model_copy(update={"dp": dp, "schedule": schedule})
        left = self.train.steps - self.optimizer.warmup_steps
        decay_steps = self.optimizer.decay_steps or max(min(self.train.steps // 10, left), 1)
        optimizer = self.optimizer.model_copy(update={"decay_steps": decay_steps})
        resume = self.checkpoint.resume
        if resume not in ("auto", "never"):
            foreign = FOREIGN if resume.startswith(FOREIGN) else ""
            resume = foreign + _place(resume.removeprefix(foreign))
        places = {"resume": resume, "dir": self.checkpoint.dir and _place(self.checkpoint.dir)}
        return self.model_copy(
            update={
                "parallel": parallel,
                "optimizer": optimizer,
                "data": _absolute_data(self.data),
                "checkpoint": self.checkpoint.model_copy(update=places),
                "observe": self.observe.model_copy(update={"dir": str(Path(self.observe.dir).absolute())}),
            }
        )


def replicas_of(parallel: ParallelConfig) -> int:
    """Processes that hold one copy of the model."""
    return parallel.tp * parallel.cp * parallel.pp


def _place(text: str) -> str:
    """An absolute path; a URL as it is."""
    return text if "://" in text else str(expanded(text))


def _absolute(path: str | None) -> str | None:
    return path and str(Path(path).absolute())


def _absolute_data(data: DataConfig) -> DataConfig:
    def absolute(source: str | Blend | None) -> str | Blend | None:
        if source is None or isinstance(source, str):
            return _absolute(source)
        return [(weight, str(Path(prefix).absolute())) for weight, prefix in source]

    return data.model_copy(
        update={
            "train": absolute(data.train),
            "valid": absolute(data.valid),
            "tokenizer": data.tokenizer if data.tokenizer in TOKENIZERS.cards else _absolute(data.tokenizer),
            "cache": _absolute(data.cache),
        }
    )


def prefixes(source: str | Blend | None) -> list[str]:
    """The dataset prefixes of a `data.train` or `data.valid` value."""
    if source is None:
        return []
    return [source] if isinstance(source, str) else [prefix for _, prefix in source]
