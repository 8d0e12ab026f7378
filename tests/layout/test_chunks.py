"""Buckets of a rank's chunks: those that are found sooner are those that are made."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.run import RunConfig
from megascale.layout.buckets import pack
from megascale.layout.chunks import chunk_buckets, packed, unit
from megascale.layout.tensors import TOKEN_EMBEDDING
from tests.plan.jobs import jobs


@settings(max_examples=60, deadline=None)
@given(jobs(), st.sampled_from([1, 10**5, 10**6, 10**9]))
def test_packed_buckets_are_those_that_are_made(config: RunConfig, most: int) -> None:
    overlap = config.overlap.model_copy(update={"bucket_bytes": most})
    config, tp, shards = config.model_copy(update={"overlap": overlap}), config.parallel.tp, config.dp
    for rank in range(config.parallel.pp):
        made, sooner = chunk_buckets(config, rank), packed(config, rank)
        sizes = [[pack(bucket, tp, shards * config.parallel.cp).size for bucket in chunk] for chunk in made]
        assert [[bucket.numbers for bucket in chunk] for chunk in sooner] == sizes
        for chunk, buckets in zip(made, sooner, strict=True):
            for number, (bucket, found) in enumerate(zip(chunk, buckets, strict=True)):
                tied = number > 0 and [parameter.name for parameter in bucket] == [TOKEN_EMBEDDING]
                assert found.unit == ("head" if tied else unit(bucket[0].name))
