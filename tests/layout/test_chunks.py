"""The buckets of a rank's model chunks: their sizes, and the weights of FP8 GEMMs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.catalog.precisions import PRECISIONS
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout import blocks
from megascale.layout.blocks import BlockSpec, block_spec, fp8_operands
from megascale.layout.buckets import pack
from megascale.layout.chunks import bucket_sizes, chunk_buckets, fp8_layers, fp8_weights, module_of
from megascale.layout.parameters import all_params
from megascale.layout.parts.linear import ColumnParallel
from megascale.layout.parts.part import LinearSpec
from megascale.layout.tensors import TOKEN_EMBEDDING
from megascale.layout.topology import topology_of
from tests.drawn import jobs
from tests.runs import FAMILIES, config_of
from tests.runs import settings as run_settings

MIB = 1 << 20
FREEZE = [[], [], ["layers.0.*norm*"], ["embedding.*", "layers.1.*.bias", "layers.*.mlp.*"]]


@settings(max_examples=60, deadline=None)
@given(jobs() | jobs(depths=True), st.sampled_from([1, 10**5, 10**6, 10**9, "auto"]), st.sampled_from(FREEZE))
def test_bucket_sizes_equal_the_packed_buckets(config: RunConfig, bucket_bytes: int | str, freeze: list[str]) -> None:
    overlap = config.overlap.model_copy(update={"bucket_bytes": bucket_bytes})
    train = config.train.model_copy(update={"freeze": freeze})
    config = config.model_copy(update={"overlap": overlap, "train": train})
    for rank in range(config.parallel.pp):
        packed, estimated = (
            chunk_buckets(config.model, config.parallel, config.overlap, config.train, rank),
            bucket_sizes(config.model, config.parallel, config.overlap, config.train, rank),
        )
        layouts = [[pack(bucket, topology_of(config.parallel)) for bucket in chunk] for chunk in packed]
        sizes = [[(layout.numel, layout.frozen) for layout in chunk] for chunk in layouts]
        assert [[(bucket.numel, bucket.frozen) for bucket in chunk] for chunk in estimated] == sizes
        for chunk, buckets in zip(packed, estimated, strict=True):
            for number, (bucket, size) in enumerate(zip(chunk, buckets, strict=True)):
                tied = number > 0 and [parameter.name for parameter in bucket] == [TOKEN_EMBEDDING]
                assert size.first_module == ("head" if tied else module_of(bucket[0].name))


def sizes(folder: Path, dp: int, **overrides: Any) -> list[list[float]]:
    """The sizes, in MiB of gradients, of the buckets of the first rank's chunks."""
    overrides = {"train__precision": "fp32", **overrides}
    tree = run_settings(FAMILIES["llama"], folder, parallel__dp=dp, batch__global=dp, **overrides)
    config = config_of(tree, folder, world=dp * overrides.get("parallel__pp", 1))
    return [
        [bucket.numel * 4 / MIB for bucket in chunk]
        for chunk in bucket_sizes(config.model, config.parallel, config.overlap, config.train, 0)
    ]


SMALL: dict[str, Any] = {
    "model__num_layers": 7,
    "model__hidden_size": 320,
    "model__num_heads": 5,
    "model__num_kv_heads": 5,
    "model__ffn_size": 896,
    "model__vocab_size": 4096,
    "model__tie_embeddings": True,
}
"""About ten million parameters: layers of 4.9 MiB and an embedding of 5."""


@pytest.mark.parametrize(
    ("dp", "expected"),
    [
        (1, [29, 10]),  # no communication: as few buckets as 32 MiB allow
        (2, [5, 5, 5, 5, 5, 5, 5, 5]),  # the norm before the head, of some KiB, goes with the last layer
        (16, [10, 10, 10, 10]),  # 8 MiB for 16 ranks
        (64, [39]),
    ],
)
def test_auto_makes_as_many_buckets_as_latency_allows(dp: int, expected: list[int], tmp_path: Path) -> None:
    assert [[round(size) for size in chunk] for chunk in sizes(tmp_path, dp, **SMALL)] == [expected]


def test_auto_splits_every_chunk_separately(tmp_path: Path) -> None:
    chunks = sizes(tmp_path, 2, parallel__pp=2, parallel__vpp=2, **SMALL | {"model__num_layers": 16})
    assert [len(chunk) for chunk in chunks] == [5, 4]  # four layers each, and the embedding at both ends
    assert [[round(size) for size in chunk] for chunk in chunks] == [[5, 5, 5, 5, 5], [5, 5, 5, 5]]


def test_auto_joins_layers_of_a_deep_chunk(tmp_path: Path) -> None:
    (chunk,) = sizes(tmp_path, 2, **SMALL | {"model__num_layers": 128})
    assert 14 <= len(chunk) <= 24
    assert max(chunk) < sum(chunk) / 14


def test_bucket_bytes_limits_the_buckets(tmp_path: Path) -> None:
    (chunk,) = sizes(tmp_path, 2, overlap__bucket_bytes=4_000_000, **SMALL)
    assert [round(size) for size in chunk] == [5] * 8 + [0]
    (chunk,) = sizes(tmp_path, 64, overlap__bucket_bytes=32 * MIB, **SMALL)
    assert [round(size) for size in chunk] == [29, 10]


@settings(max_examples=100, deadline=None)
@given(jobs(), st.sampled_from([2, 8, 64]))
def test_shards_of_auto_buckets_have_the_minimum_size(config: RunConfig, dp: int) -> None:
    overlap = config.overlap.model_copy(update={"bucket_bytes": "auto"})
    parallel = config.parallel.model_copy(update={"dp": dp})
    config = config.model_copy(update={"overlap": overlap, "parallel": parallel})
    element_bytes = PRECISIONS[config.train.precision].facts["accumulate_bytes"]
    for rank in range(config.parallel.pp):
        for chunk in chunk_buckets(config.model, config.parallel, config.overlap, config.train, rank):
            untied = [bucket for bucket in chunk if [parameter.name for parameter in bucket] != [TOKEN_EMBEDDING]]
            numels = [
                sum(parameter.local_numel(topology_of(config.parallel)) for parameter in bucket) for bucket in untied
            ]
            assert len(untied) <= 1 or min(numels) * element_bytes >= dp * (512 << 10)


def test_a_router_is_no_fp8_gemm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 GEMMs are those of layers with the `fp8` flag: neither a router, nor embedding or head."""
    serial = blocks.serial_block
    router = LinearSpec("mlp.router", "router", 32, (("router", 8),), fp8=False)

    def routed(model: ModelConfig, layer: int) -> BlockSpec:
        return (*serial(model, layer), ColumnParallel((router,)))

    tree = run_settings(
        FAMILIES["gpt"], tmp_path, train__precision="fp8", fp8__first_layers_bf16=0, fp8__last_layers_bf16=1
    )
    config = config_of(tree, tmp_path)
    cast = list(fp8_weights(config.model, fp8_layers(config.model, config.train, config.fp8)))
    cast_operands = list(fp8_operands(block_spec(config.model, 0)))
    monkeypatch.setattr(blocks, "serial_block", routed)
    matrices = {parameter.name for parameter in all_params(config.model) if parameter.is_matrix}
    assert f"layers.0.{router.name}.weight" in matrices
    parts = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    expected = [f"layers.{i}.{part}.weight" for i in range(3) for part in parts]
    assert list(fp8_weights(config.model, fp8_layers(config.model, config.train, config.fp8))) == cast == expected
    assert list(fp8_operands(block_spec(config.model, 0))) == cast_operands
