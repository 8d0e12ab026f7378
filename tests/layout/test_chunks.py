"""Buckets of a rank's chunks: those that are found sooner are those that are made."""

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
from megascale.layout.blocks import Block, Columns, Linear, block, operands
from megascale.layout.buckets import pack
from megascale.layout.chunks import chunk_buckets, eight_bit_weights, packed, unit
from megascale.layout.tensors import TOKEN_EMBEDDING, whole
from megascale.layout.topology import topology_of
from tests.drawn import jobs
from tests.runs import FAMILIES, config_of
from tests.runs import settings as run_settings

MIB = 1 << 20


@settings(max_examples=60, deadline=None)
@given(jobs(), st.sampled_from([1, 10**5, 10**6, 10**9, "auto"]))
def test_packed_buckets_are_those_that_are_made(config: RunConfig, most: int | str) -> None:
    overlap = config.overlap.model_copy(update={"bucket_bytes": most})
    config = config.model_copy(update={"overlap": overlap})
    for rank in range(config.parallel.pp):
        made, sooner = chunk_buckets(config, rank), packed(config, rank)
        sizes = [[pack(bucket, topology_of(config)).size for bucket in chunk] for chunk in made]
        assert [[bucket.numbers for bucket in chunk] for chunk in sooner] == sizes
        for chunk, buckets in zip(made, sooner, strict=True):
            for number, (bucket, found) in enumerate(zip(chunk, buckets, strict=True)):
                tied = number > 0 and [parameter.name for parameter in bucket] == [TOKEN_EMBEDDING]
                assert found.unit == ("head" if tied else unit(bucket[0].name))


def sizes(folder: Path, dp: int, **more: Any) -> list[list[float]]:
    """MiB of gradients in the buckets of each chunk of the first rank."""
    more = {"train__precision": "fp32", **more}
    tree = run_settings(FAMILIES["llama"], folder, parallel__dp=dp, batch__global=dp, **more)
    config = config_of(tree, folder, world=dp * more.get("parallel__pp", 1))
    return [[bucket.numbers * 4 / MIB for bucket in chunk] for chunk in packed(config, 0)]


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
        (1, [29, 10]),  # nothing travels: as few buckets as 32 MiB allow
        (2, [5, 5, 5, 5, 5, 5, 5, 5]),  # the norm before the head, of some KiB, goes with the last layer
        (16, [10, 10, 10, 10]),  # 8 MiB for 16 ranks
        (64, [39]),
    ],
)
def test_auto_makes_buckets_as_many_as_latency_allows(dp: int, expected: list[int], tmp_path: Path) -> None:
    assert [[round(size) for size in chunk] for chunk in sizes(tmp_path, dp, **SMALL)] == [expected]


def test_auto_cuts_each_chunk_by_itself(tmp_path: Path) -> None:
    chunks = sizes(tmp_path, 2, parallel__pp=2, parallel__vpp=2, **SMALL | {"model__num_layers": 16})
    assert [len(chunk) for chunk in chunks] == [5, 4]  # four layers each, and the embedding at both ends
    assert [[round(size) for size in chunk] for chunk in chunks] == [[5, 5, 5, 5, 5], [5, 5, 5, 5]]


def test_auto_joins_layers_of_a_deep_chunk(tmp_path: Path) -> None:
    (chunk,) = sizes(tmp_path, 2, **SMALL | {"model__num_layers": 128})
    assert 14 <= len(chunk) <= 24
    assert max(chunk) < sum(chunk) / 14


def test_a_number_is_obeyed(tmp_path: Path) -> None:
    (chunk,) = sizes(tmp_path, 2, overlap__bucket_bytes=4_000_000, **SMALL)
    assert [round(size) for size in chunk] == [5] * 8 + [0]
    (chunk,) = sizes(tmp_path, 64, overlap__bucket_bytes=32 * MIB, **SMALL)
    assert [round(size) for size in chunk] == [29, 10]


@settings(max_examples=100, deadline=None)
@given(jobs(), st.sampled_from([2, 8, 64]))
def test_each_rank_has_its_share_of_a_bucket_of_auto(config: RunConfig, dp: int) -> None:
    overlap = config.overlap.model_copy(update={"bucket_bytes": "auto"})
    parallel = config.parallel.model_copy(update={"dp": dp})
    config = config.model_copy(update={"overlap": overlap, "parallel": parallel})
    number_bytes = PRECISIONS[config.train.precision].facts["accumulate_bytes"]
    for rank in range(config.parallel.pp):
        for chunk in chunk_buckets(config, rank):
            own = [bucket for bucket in chunk if [parameter.name for parameter in bucket] != [TOKEN_EMBEDDING]]
            numbers = [sum(parameter.local_numel(topology_of(config)) for parameter in bucket) for bucket in own]
            assert len(own) <= 1 or min(numbers) * number_bytes >= dp * (512 << 10)


def test_fp8_multiplies_no_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor another matrix of the model that does not say so: an embedding, the head."""
    serial = blocks.serial
    router = Linear("mlp.router", "router", 32, (("router", 8),), fp8=False)

    def routed(model: ModelConfig, layer: int) -> Block:
        return (*serial(model, layer), Columns((router,)))

    tree = run_settings(FAMILIES["gpt"], tmp_path, train__precision="fp8", fp8__bf16_first=0, fp8__bf16_last=1)
    config = config_of(tree, tmp_path)
    cast, cast_operands = list(eight_bit_weights(config)), list(operands(block(config.model, 0)))
    monkeypatch.setattr(blocks, "serial", routed)
    matrices = {parameter.name for parameter in whole(config.model) if parameter.is_matrix}
    assert f"layers.0.{router.name}.weight" in matrices
    parts = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert list(eight_bit_weights(config)) == cast == [f"layers.{i}.{part}.weight" for i in range(3) for part in parts]
    assert list(operands(block(config.model, 0))) == cast_operands
