"""Construction of a run's loaders: the samples of its splits, and the order in which steps read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megascale.config.run import RunConfig
from megascale.config.teacher_file import needed_labels
from megascale.core.errors import DataError
from megascale.data.mix.batch_shape import BatchShape, StepOrder, reads_samples
from megascale.data.mix.loader import Loader
from megascale.data.mix.mock_mixture import build_mixture
from megascale.data.mix.teacher import soft_labels
from megascale.layout.chunks import token_ranks
from megascale.layout.document_shards import row_sharding
from megascale.layout.sequence_shard import sequence_chunks
from megascale.parallel.auxiliary_objectives import load_objectives
from megascale.train.run_splits import mixture_spec

if TYPE_CHECKING:
    from megascale.comm.mesh import Mesh
    from megascale.config.dataset_files import SplitName
    from megascale.config.model import ModelConfig
    from megascale.config.parallel import ParallelConfig
    from megascale.data.mix.hybrid_batches import HybridPool
    from megascale.data.mix.mixture_spec import MixtureSpec
    from megascale.data.mix.samples import SampleSource


def build_loaders(config: RunConfig, mesh: Mesh, device: torch.device) -> tuple[Loader, Loader | None, int]:
    """Build the loaders of training and validation data. Also returns the batches per evaluation.

    Raises: DataError on rank 0 for unusable data, and without memory for a host's reader.
    """
    model, batch, train, p, sites = config.model, config.batch, config.train, config.parallel, config.sites
    valid_shape = BatchShape(batch.total, batch.micro, config.dp)
    shape = replace(valid_shape, global_batch=sites.count * batch.total, site=sites.index, sites=sites.count)
    sizes = config.step_samples if batch.rampup else None
    orders: dict[SplitName, StepOrder] = {"train": StepOrder(shape, config.samples, sizes=sizes)}
    splits: tuple[SplitName, ...] = ("train", "valid") if train.eval_every else ("train",)
    specs = {split: mixture_spec(config, split) for split in splits}
    if mesh.rank == 0:  # the headers of all datasets, for all ranks, which open what they read when they read it
        for spec in specs.values():
            build_mixture(spec).check()
    valid_batches = 0
    if train.eval_every:
        valid_batches = _evaluation_batches(specs["valid"], train.eval_steps, batch.total, mesh)
    if valid_batches:
        orders["valid"] = StepOrder(valid_shape, valid_batches * batch.total, again=True)
    readers, last = token_ranks(model, p), mesh.has_last_stage
    sources, fp8 = _open_sources(specs, mesh, orders, readers), config.fp8.facts if train.quantizes else None
    pool = _hybrid_pool(model, p, fp8, mesh, config.data.max_tokens_per_rank, device)
    teacher = None
    if train.distill_teacher and last:
        teacher = soft_labels(train.teacher_file, needed_labels(model, batch, train, sites))
    training, *valid = (
        Loader(
            sources.get(split),
            order.shape,
            mesh.coord.dp,
            dropout=model.dropout if split == "train" else 0.0,
            seed=train.seed,
            device=device,
            reads_tokens=mesh.coord.pp in readers,
            sharding=row_sharding(p, model, fp8, mesh.coord.cp),
            chunks=sequence_chunks(model.seq_length, config.data.sequence_chunk_tokens),
            pool=pool,
            sizes=order.sizes,
            depths=model.mtp_layers if split == "train" and last else 0,
            teacher=teacher if split == "train" else None,
            distill_alpha=train.distill_alpha,
            objectives=load_objectives(train) if split == "train" and last else {},
        )
        for split, order in orders.items()
    )
    return training, valid[0] if valid else None, valid_batches


def _hybrid_pool(
    model: ModelConfig, parallel: ParallelConfig, fp8: Mapping[str, Any] | None, mesh: Mesh, most: int | None,
    device: torch.device,
) -> HybridPool | None:  # fmt: skip
    """Return this rank of the pool of hybrid data parallelism, with at most `most` tokens; None in other modes. Rows
    have padding where operations are compiled by default, and for FP8 GEMMs.
    """
    if not parallel.hybrid_dp:
        return None
    from megascale.data.mix.hybrid_batches import HybridPool
    from megascale.layout.hybrid.plan import ROW_ALIGNMENT, row_step
    from megascale.plan.account.flops import sequence_flops

    assert most is not None, "the rules of hybrid data parallelism demand it"
    reads = mesh.coord.pp in token_ranks(model, parallel)
    alignment = ROW_ALIGNMENT if fp8 is None else fp8["alignment"]
    step = 1 if device.type == "cpu" and fp8 is None else row_step(most, alignment)
    return HybridPool(mesh.dp.index, mesh.dp.size, most, sequence_flops(model), parallel.pp, reads, step)


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
