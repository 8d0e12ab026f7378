"""Construction of a run's loaders: the samples of its splits, and the order in which steps read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megascale.comm.mesh import Mesh
from megascale.config.batch_rampup import batch_sizes
from megascale.config.dataset_files import SplitName
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.data.mix.batch_shape import BatchShape, StepOrder, reads_samples, reads_tokens
from megascale.data.mix.loader import Loader
from megascale.data.mix.mock_mixture import build_mixture
from megascale.data.mix.samples import SampleSource
from megascale.device import Device
from megascale.layout.document_shards import row_sharding
from megascale.layout.sequence_shard import sequence_chunks
from megascale.plan.account.flops import sequence_flops
from megascale.train.run_splits import mixture_spec

if TYPE_CHECKING:
    from megascale.data.mix.hybrid_batches import HybridPool


def build_loaders(config: RunConfig, mesh: Mesh, device: Device) -> tuple[Loader, Loader | None, int]:
    """Build the loaders of training and validation data. Also returns the batches per evaluation.

    Raises: DataError on rank 0 for unusable data, and without memory for a host's reader.
    """
    shape = BatchShape(config.batch.total, config.batch.micro, config.dp)
    sizes = batch_sizes(config.batch) if config.batch.rampup else None
    orders: dict[SplitName, StepOrder] = {"train": StepOrder(shape, config.samples, sizes=sizes)}
    if mesh.rank == 0:
        for split in ("train", "valid") if config.train.eval_every else ("train",):
            _check_data(config, split)
    valid_batches = _evaluation_batches(config, mesh) if config.train.eval_every else 0
    if valid_batches:
        orders["valid"] = StepOrder(shape, valid_batches * config.batch.total, again=True)
    recipe = config.fp8.recipe if config.train.quantizes else None
    sources = _open_sources(config, mesh, orders)
    sharding = row_sharding(config.parallel, config.model, recipe, mesh.coord.cp)
    train, *valid = (
        Loader(
            sources.get(split),
            shape,
            mesh.coord.dp,
            dropout=config.model.dropout if split == "train" else 0.0,
            seed=config.train.seed,
            device=device.torch_device,
            reads_tokens=reads_tokens(mesh.topology, mesh.rank),
            sharding=sharding,
            chunks=sequence_chunks(config.model.seq_length, config.data.chunk_tokens),
            pool=hybrid_pool(config, mesh),
            sizes=order.sizes,
        )
        for split, order in orders.items()
    )
    return train, valid[0] if valid else None, valid_batches


def hybrid_pool(config: RunConfig, mesh: Mesh) -> HybridPool | None:
    """Return this rank of the pool of hybrid data parallelism; None in other modes."""
    if config.parallel.cp_mode != "hybrid":
        return None
    from megascale.data.mix.hybrid_batches import HybridPool

    assert config.data.max_tokens_per_rank is not None, "the rules of hybrid data parallelism demand it"
    pool, most = (mesh.dp.index, mesh.dp.size), config.data.max_tokens_per_rank
    reads = reads_tokens(mesh.topology, mesh.rank)
    return HybridPool(*pool, most, sequence_flops(config.model), config.parallel.pp, reads)


def _check_data(config: RunConfig, split: SplitName) -> None:
    """Open the headers of all datasets of a split, for all ranks, which open what they read when they read it.

    Raises: DataError for unusable data.
    """
    build_mixture(mixture_spec(config, split)).check()


def _open_sources(
    config: RunConfig, mesh: Mesh, orders: Mapping[SplitName, StepOrder]
) -> Mapping[SplitName, SampleSource]:
    """Open the samples of each split; none on a rank that needs none."""
    if not reads_samples(config.data.mask, mesh.topology, mesh.rank):
        return {}
    specs = {split: mixture_spec(config, split) for split in orders}
    if config.data.reader == "host":
        from megascale.data.host_reader.host_samples import open_host_samples

        return open_host_samples(specs, mesh, orders)
    return {split: build_mixture(specs[split], 0 if order.again else order.end) for split, order in orders.items()}


def _evaluation_batches(config: RunConfig, mesh: Mesh) -> int:
    """Global batches of an evaluation, at most as many as the data has without repetition. Rank 0 reads their sizes."""
    if config.data.mock:
        return config.train.eval_steps
    batches = 0
    if mesh.rank == 0:
        from megascale.data.mix.mixture import Mixture

        samples = Mixture(mixture_spec(config, "valid")).samples_without_repetition()
        batches = min(config.train.eval_steps, samples // config.batch.total)
        if batches == 0:
            what = f"{samples} samples to validate on are fewer than one global batch of {config.batch.total}"
            raise DataError(what, hint="more data, another data.split, or a smaller batch.global")
    count: int = mesh.world.control.broadcast(batches, "batches of an evaluation")
    return count
