"""Construction of a run's loaders: the samples of its splits, and the order in which steps read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from megascale.config.batch_rampup import teacher_samples
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.data.mix.batch_shape import BatchShape, StepOrder, reads_samples
from megascale.data.mix.loader import Distilling, Loader
from megascale.data.mix.mock_mixture import build_mixture
from megascale.layout.chunks import token_ranks
from megascale.layout.sequence_shard import sequence_chunks
from megascale.parallel.auxiliary_objectives import load_objectives
from megascale.train.run_splits import mixture_spec

if TYPE_CHECKING:
    from megascale.comm.mesh import Mesh
    from megascale.config.dataset_files import SplitName
    from megascale.config.model import ModelConfig
    from megascale.config.sites import SitesConfig
    from megascale.config.train import BatchConfig, TrainConfig
    from megascale.data.mix.hybrid_batches import HybridPool
    from megascale.data.mix.mixture_spec import MixtureSpec
    from megascale.data.mix.samples import SampleSource
    from megascale.layout.document_shards import RowSharding


def build_loaders(config: RunConfig, mesh: Mesh, device: torch.device) -> tuple[Loader, Loader | None, int]:
    """Build the loaders of training and validation data. Also returns the batches per evaluation.

    Raises: DataError on rank 0 for unusable data, and without memory for a host's reader.
    """
    valid_shape = BatchShape(config.batch.total, config.batch.micro, config.dp)
    sites = config.sites
    shape = replace(valid_shape, global_batch=sites.count * config.batch.total, site=sites.index, sites=sites.count)
    sizes = config.step_samples if config.batch.rampup else None
    orders: dict[SplitName, StepOrder] = {"train": StepOrder(shape, config.samples, sizes=sizes)}
    splits: tuple[SplitName, ...] = ("train", "valid") if config.train.eval_every else ("train",)
    specs = {split: mixture_spec(config, split) for split in splits}
    if mesh.rank == 0:  # the headers of all datasets, for all ranks, which open what they read when they read it
        for spec in specs.values():
            build_mixture(spec).check()
    valid_batches = 0
    if config.train.eval_every:
        valid_batches = _evaluation_batches(specs["valid"], config.train.eval_steps, config.batch.total, mesh)
    if valid_batches:
        orders["valid"] = StepOrder(valid_shape, valid_batches * config.batch.total, again=True)
    readers = token_ranks(config.model, config.parallel)
    sources = _open_sources(specs, mesh, orders, readers)
    sharding, pool = _row_sharding(config, mesh), _hybrid_pool(config, mesh, device)
    last, train = mesh.has_last_stage, config.train
    teacher = _open_teacher(config.model, config.batch, train, sites) if train.distills and last else None
    training, *valid = (
        Loader(
            sources.get(split),
            order.shape,
            mesh.coord.dp,
            dropout=config.model.dropout if split == "train" else 0.0,
            seed=config.train.seed,
            device=device,
            reads_tokens=mesh.coord.pp in readers,
            sharding=sharding,
            chunks=sequence_chunks(config.model.seq_length, config.data.sequence_chunk_tokens),
            pool=pool,
            sizes=order.sizes,
            depths=config.model.mtp_layers if split == "train" and last else 0,
            teacher=teacher if split == "train" else None,
            objectives=load_objectives(train) if last else {},
        )
        for split, order in orders.items()
    )
    return training, valid[0] if valid else None, valid_batches


def _open_teacher(model: ModelConfig, batch: BatchConfig, train: TrainConfig, sites: SitesConfig) -> Distilling:
    """Open the soft labels of the run."""
    from megascale.data.mix.teacher import mock_labels, open_labels

    random = partial(mock_labels, train.seed, model.vocab_size, train.distill_top_k)
    source = random if train.teacher_file is None else open_labels(train.teacher_file, train.distill_top_k)
    samples = teacher_samples(batch, train, sites.count)
    return Distilling(source, samples, train.distill_alpha, train.distill_temperature)


def _row_sharding(config: RunConfig, mesh: Mesh) -> RowSharding | None:
    """Return how this rank shares sequences; None for whole ones."""
    if config.parallel.cp == 1 or config.parallel.hybrid_dp:
        return None
    from megascale.layout.document_shards import row_sharding

    fp8 = config.fp8.facts if config.train.quantizes else None
    return row_sharding(config.parallel, config.model, fp8, mesh.coord.cp)


def _hybrid_pool(config: RunConfig, mesh: Mesh, device: torch.device) -> HybridPool | None:
    """Return this rank of the pool of hybrid data parallelism; None in other modes. Rows have padding where operations
    are compiled by default, and for FP8 GEMMs.
    """
    if not config.parallel.hybrid_dp:
        return None
    from megascale.data.mix.hybrid_batches import HybridPool
    from megascale.layout.hybrid.plan import ROW_ALIGNMENT, row_step
    from megascale.plan.account.flops import sequence_flops

    assert config.data.max_tokens_per_rank is not None, "the rules of hybrid data parallelism demand it"
    pool, most = (mesh.dp.index, mesh.dp.size), config.data.max_tokens_per_rank
    reads = mesh.coord.pp in token_ranks(config.model, config.parallel)
    quantizes = config.train.quantizes
    alignment = config.fp8.facts["alignment"] if quantizes else ROW_ALIGNMENT
    step = 1 if device.type == "cpu" and not quantizes else row_step(most, alignment)
    return HybridPool(*pool, most, sequence_flops(config.model), config.parallel.pp, reads, step)


def _open_sources(
    specs: Mapping[SplitName, MixtureSpec], mesh: Mesh, orders: Mapping[SplitName, StepOrder], readers: Collection[int]
) -> Mapping[SplitName, SampleSource]:
    """Open the samples of each split; none on a rank that needs none."""
    data = specs["train"].data
    if not reads_samples(data.attention_mask, readers, mesh.coord.pp):
        return {}
    if data.reader == "host":
        from megascale.data.host_reader.host_samples import open_host_samples

        return open_host_samples({split: specs[split] for split in orders}, mesh, orders, readers)
    return {split: build_mixture(specs[split], 0 if order.again else order.end) for split, order in orders.items()}


def _evaluation_batches(spec: MixtureSpec, steps: int, batch: int, mesh: Mesh) -> int:
    """Global batches of an evaluation, at most as many as the data has without repetition. Rank 0 reads their sizes.
    `steps`: those configured; `batch`: samples of one.
    """
    if spec.data.mock:
        return steps
    batches = 0
    if mesh.rank == 0:
        from megascale.data.mix.mixture import Mixture

        samples = Mixture(spec).samples_without_repetition()
        batches = min(steps, samples // batch)
        if batches == 0:
            what = f"{samples} samples to validate on are fewer than one global batch of {batch}"
            raise DataError(what, hint="more data, another data.split, or a smaller batch.global")
    count: int = mesh.world.control.broadcast(batches, "batches of an evaluation")
    return count
