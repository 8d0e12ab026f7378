"""Chunks of sequences are the same run as whole sequences, in fp64, with activations that do not grow with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.parallel.kv_store import KVStore
from megascale.train.evaluate import evaluate
from megascale.train.step import train_step
from tests.parallel.test_context_parallel import CASES, LATENT, check, configure, layout
from tests.thread_world import run_threads

CHUNKS = {
    "12, K = 1": {"data__sequence_chunk_tokens": 12},
    "4, K = 2": {"data__sequence_chunk_tokens": 4, "data__sequence_chunks_saved": 2},
    "2, K = 12": {"data__sequence_chunk_tokens": 2, "data__sequence_chunks_saved": 12},
}
LAYOUTS = {
    "alone": {},
    "tp2 sp": layout(tp=2, sp=True),
    "dp2 zero2": layout(dp=2, zero=2),
    "pp2": layout(pp=2),
    "pp3": layout(pp=3),
    "pp3 tp2": layout(pp=3, tp=2),
    "pp2 dp2 zero0": layout(pp=2, dp=2, zero=0),
    "pp2 zero2, no overlap": layout(pp=2, zero=2) | {"overlap__pp": False, "overlap__dp": False},
}
QUICK = [
    ("gpt, windows, parallel block", "12, K = 1", "alone"),
    ("llama, packed, window, recomputed", "12, K = 1", "tp2 sp"),
    ("llama, recomputed attention, scale", "4, K = 2", "pp3"),
    (LATENT, "4, K = 2", "alone"),
]


@pytest.mark.parametrize(("case", "chunks", "name"), QUICK)
def test_chunks_do_not_change_a_run(case: str, chunks: str, name: str, tmp_path: Path) -> None:
    check(case, CHUNKS[chunks] | LAYOUTS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_chunks_change_a_run(case: str, chunks: str, name: str, tmp_path: Path) -> None:
    check(case, CHUNKS[chunks] | LAYOUTS[name], tmp_path)


class SavedBytes:
    """Bytes of the tensors that autograd holds for backward, without the weights; `peak`: the most at a time."""

    def __init__(self, weights: list[Tensor]) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._held: dict[int, int] = {}
        self._now = self.peak = 0

    def pack(self, tensor: Tensor) -> _Held:
        storage = tensor.untyped_storage()
        counted = storage.data_ptr() not in self._weights
        return _Held(self, tensor, storage.data_ptr(), storage.nbytes() if counted else 0)

    def add(self, place: int, size: int, holders: int) -> None:
        before = self._held.get(place, 0)
        self._held[place] = before + holders
        if (before == 0) != (before + holders == 0):
            self._now += size * holders
            self.peak = max(self.peak, self._now)


class _Held:
    """A saved tensor, counted once with others in the same memory."""

    def __init__(self, total: SavedBytes, tensor: Tensor, place: int, size: int) -> None:
        self.tensor, self._total, self._place, self._size = tensor, total, place, size
        total.add(place, size, 1)

    def __del__(self) -> None:
        self._total.add(self._place, self._size, -1)


def saved_at_peak(folder: Path, length: int, **chunks: int) -> int:
    """The most bytes that are saved for backward in a step of two sequences of `length`."""
    keys: dict[str, Any] = {f"data__{key}": value for key, value in chunks.items()}
    config = configure(CASES["llama"], folder, model__seq_length=length, batch__global=2, **keys)

    def step(run: Any) -> int:
        saved = SavedBytes([bucket.weights for bucket in run.buffers.buckets])
        batch = run.train_loader.batch(0)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
            train_step(run, batch)
        return saved.peak

    return int(run_threads(config, step)[0])


def test_saved_activations_do_not_grow_with_the_sequence(tmp_path: Path) -> None:
    of_chunk, *longer = (saved_at_peak(tmp_path, length, sequence_chunk_tokens=16) for length in (32, 64, 128))
    assert longer == [of_chunk] * 2
    two = saved_at_peak(tmp_path, 128, sequence_chunk_tokens=16, sequence_chunks_saved=2)
    assert 1.9 * of_chunk < two < 2.1 * of_chunk
    assert saved_at_peak(tmp_path, 128) > 7 * of_chunk


def test_keys_are_freed_with_their_last_use(tmp_path: Path) -> None:
    config = configure(CASES["gpt"], tmp_path, data__sequence_chunk_tokens=8, parallel__pp=2)

    def stores(run: Any) -> list[KVStore]:
        run_actions, found = run.pipeline.run_actions, list[KVStore]()

        def collect(order: Any, batch: Any) -> Tensor:
            loss: Tensor = run_actions(order, batch)
            found.extend(part.keys for part in batch.micro_batches)
            return loss

        run.pipeline.run_actions = collect
        train_step(run, run.train_loader.batch(0))
        run.buffers.finish_param_gather()
        evaluate(run)
        return found

    for found in run_threads(config, stores):
        assert len(found) == 24 and len(set(map(id, found))) == 8, "three chunks of a sequence share a store"
        assert not any(store.blocks or store.grads for store in found)
