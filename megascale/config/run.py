"""The complete configuration of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megascale.catalog.decays import uses_decay_steps
from megascale.config.backends import BF16, BackendsConfig, Fp8Config, bf16_layers
from megascale.config.batch_rampup import BatchSizes, batch_sizes, samples_of_run, schedule_steps
from megascale.config.data import DataConfig
from megascale.config.fault import FaultConfig
from megascale.config.finding import divisors
from megascale.config.launch import CommConfig, LaunchConfig, NcclConfig
from megascale.config.model import ModelConfig
from megascale.config.moe import MoeConfig
from megascale.config.parallel import OverlapConfig, ParallelConfig
from megascale.config.section import FilePath, Section, absolute_or_url
from megascale.config.sites import SitesConfig
from megascale.config.train import HF_PREFIX, BatchConfig, CheckpointConfig, ObserveConfig, OptimizerConfig, TrainConfig

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # valid names of runs, which are folder names


class RunKeys(Section):
    """The keys above the sections: the run's folder is `output_dir`/`name`."""

    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN.pattern}$")] = Field(
        description="name of the run and of its folder"
    )
    output_dir: FilePath = Field("runs", description="parent of the run's folder")


class RunConfig(RunKeys):
    """A run's name and sections. Frozen; `resolve` returns a copy with all derived values."""

    model: ModelConfig
    moe: MoeConfig = MoeConfig()
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
    comm: CommConfig = CommConfig()
    nccl: NcclConfig = NcclConfig()
    fault: FaultConfig = FaultConfig()
    sites: SitesConfig = SitesConfig()

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def checkpoint_folder(self) -> str:
        """Folder of the run's checkpoints, a path or a URL."""
        parent = self.checkpoint.dir
        return str(self.folder / "checkpoints") if parent is None else f"{parent.rstrip('/')}/{self.name}"

    @property
    def store_folder(self) -> str:
        """The run's event store, a path or a URL."""
        parent = self.observe.store_dir
        return str(self.folder / "events") if parent is None else f"{parent.rstrip('/')}/{self.name}"

    @property
    def dp(self) -> int:
        return self.parallel.replicas

    @property
    def world_size(self) -> int:
        return self.parallel.replica_size * self.dp

    @property
    def sites_hang_s(self) -> float:
        """Seconds without progress that a meeting of sites explains: a late site is waited for, then the exchange."""
        return self.sites.grace_s + self.comm.timeout_s

    @property
    def samples(self) -> int:
        """The samples that all steps consume, at all sites."""
        return self.sites.count * samples_of_run(self.batch, self.train)

    @property
    def step_samples(self) -> BatchSizes:
        """The samples that each step consumes, at all sites."""
        return batch_sizes(self.batch, self.sites.count)

    def changed(self, **sections: Mapping[str, Any]) -> RunConfig:
        """Return a copy with other values by section and key, unchecked."""
        made = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=made)

    @property
    def phases(self) -> list[RunConfig]:
        """The configurations of the phases of `fp8.schedule`, each with a single recipe."""
        in_bf16 = self.train.model_copy(update={"precision": "bf16"})
        return [
            self.model_copy(update={"fp8": fp8, "train": in_bf16 if change == BF16 else self.train})
            for change, fp8 in self.fp8.phases
        ]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per data-parallel rank and step, of whole samples or of chunks; of planned ones the least."""
        if self.parallel.hybrid_dp:
            return -(-self.batch.total * self.model.seq_length // (self.dp * self.parallel.cp * self.row_tokens))
        return self.batch.total // (self.batch.micro * self.dp) * self.num_chunks

    @property
    def num_chunks(self) -> int:
        """Dependent chunks of a sample, each a micro-batch; 1 for whole samples."""
        return self.model.seq_length // (self.data.sequence_chunk_tokens or self.model.seq_length)

    @property
    def dropped_chunks(self) -> int:
        """Chunks of a sample without saved activations, recomputed in backward."""
        return max(0, self.num_chunks - self.data.sequence_chunks_saved)

    @property
    def dropped_share(self) -> float:
        return self.dropped_chunks / self.num_chunks

    @property
    def attends_in_parts(self) -> bool:
        """True for attention to some of the keys at a time: other ranks' keys, or the keys of chunks."""
        chunked = self.data.sequence_chunk_tokens is not None
        return self.parallel.cp_keys > 1 or self.parallel.hybrid_dp or chunked

    @property
    def row_tokens(self) -> int:
        """Tokens of a sample in a micro-batch of a rank."""
        return self.data.max_tokens_per_rank or self.model.seq_length // (self.parallel.cp * self.num_chunks)

    @property
    def _least_dp(self) -> int:
        """The fewest replicas with ranks for all experts and shards, whole groups of samples, room for the longest
        document.
        """
        p, batch, moe, inner = self.parallel, self.batch, self.moe, self.parallel.dp_shard or 1
        if p.hybrid_dp and self.data.max_tokens_per_rank:
            least = -(-self.model.seq_length // (self.data.max_tokens_per_rank * p.cp))
            return next((dp for dp in divisors(batch.total) if dp >= least and dp % inner == 0), least)
        group = moe.balance_group if moe.balance == "group" else 1
        return math.lcm(p.ep // math.gcd(p.ep, p.tp * p.cp), group // math.gcd(group, batch.micro), inner)

    def resolve(self, world_size: int | None) -> RunConfig:
        """Return a copy with values for all defaults that depend on other keys or on the number of processes.

        `world_size`: processes of the job, or None for the smallest number that the layout allows.
        """
        p = self.parallel
        dp = p.dp if isinstance(p.dp, int) else world_size // p.replica_size if world_size else self._least_dp
        schedule = p.schedule or ("interleaved_1f1b" if p.vpp > 1 else "1f1b")
        parallel = p.model_copy(update={"dp": dp, "schedule": schedule})
        optimizer = self.optimizer
        if uses_decay_steps(optimizer.decay):
            steps = schedule_steps(self.batch, self.train, optimizer)
            decay_steps = optimizer.decay_steps or max(min(steps // 10, steps - optimizer.warmup_steps), 1)
            optimizer = optimizer.model_copy(update={"decay_steps": decay_steps})
        fp8 = self.fp8
        if self.train.quantizes:
            first, last = bf16_layers(fp8, self.model.num_layers)
            fp8 = fp8.model_copy(update={"first_layers_bf16": first, "last_layers_bf16": last})
        resume = self.checkpoint.resume
        if resume not in ("auto", "never"):
            prefix = HF_PREFIX if resume.startswith(HF_PREFIX) else ""
            resume = prefix + absolute_or_url(resume.removeprefix(prefix))
        teacher = self.train.teacher_file and absolute_or_url(self.train.teacher_file)
        paths = {"resume": resume, "dir": self.checkpoint.dir and absolute_or_url(self.checkpoint.dir)}
        store_dir = self.observe.store_dir and absolute_or_url(self.observe.store_dir)
        return self.model_copy(
            update={
                "output_dir": str(Path(self.output_dir).absolute()),
                "parallel": parallel,
                "optimizer": optimizer,
                "train": self.train.model_copy(update={"distill_teacher": teacher or self.train.distill_teacher}),
                "fp8": fp8,
                "data": self.data.absolute(),
                "checkpoint": self.checkpoint.model_copy(update=paths),
                "observe": self.observe.model_copy(update={"store_dir": store_dir}),
            }
        )
