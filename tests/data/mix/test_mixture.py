"""The order and content of samples equal a cut by hand, and depend on the seed and the sample index alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, DataError
from megascale.data.mix.mixture import Mixture
from megascale.data.mix.mock_mixture import MockMixture, build_mixture
from megascale.train.run_splits import mixture_spec
from tests.data.datasets import SEQUENCE, VOCABULARY, data_config, mixture_of, write_dataset
from tests.runs import GPT, config_of
from tests.runs import settings as settings_of

LENGTHS = [13, 5, 1, 40, 8, 9, 30, 2, 21, 17, 16, 33]  # 195 tokens: 24 samples of 8


def rows(samples: Mixture | MockMixture, numbers: Sequence[int]) -> list[list[int]]:
    """The tokens and the last label of samples. Labels are checked to be the tokens shifted by one."""
    result = []
    for number in numbers:
        sample = samples[number]
        assert sample.mask is None
        assert sample.tokens.shape == sample.labels.shape
        assert (sample.tokens[1:] == sample.labels[:-1]).all()
        result.append([*sample.tokens.tolist(), int(sample.labels[-1])])
    return result


def stream_of(samples: list[list[int]]) -> list[int]:
    """Concatenate the samples of an epoch: a sample begins with the last label of its predecessor."""
    following = {sample[0]: sample for sample in samples}
    first = set(following) - {sample[-1] for sample in samples}
    assert len(following) == len(samples)
    assert len(first) == 1
    stream = [first.pop()]
    while stream[-1] in following:
        stream += following[stream[-1]][1:]
    return stream


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 9), st.integers(0, 2**40))
@settings(max_examples=40)
def test_an_epoch_is_the_shuffled_documents_cut_to_size(lengths: list[int], sequence: int, seed: int) -> None:
    tokens = sum(lengths)
    if tokens <= sequence:
        return
    with tempfile.TemporaryDirectory() as name:
        documents = write_dataset(Path(name) / "set", lengths)
        config = data_config(Path(name), Path(name) / "set", model__seq_length=sequence, train__seed=seed)
        per_epoch = (tokens - 1) // sequence
        samples = mixture_of(config)
        for epoch in range(3):
            cut = rows(samples, range(epoch * per_epoch, (epoch + 1) * per_epoch))
            stream = stream_of(cut)
            assert len(set(stream)) == len(stream) == per_epoch * sequence + 1
            order = list(dict.fromkeys(np.searchsorted(np.cumsum(lengths), stream, side="right").tolist()))
            shuffled = np.concatenate([documents[index] for index in order])
            assert shuffled[: len(stream)].tolist() == stream


def test_every_epoch_has_an_order_of_its_own(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    samples = mixture_of(data_config(tmp_path, tmp_path / "set"))
    epochs = [rows(samples, range(epoch * 24, (epoch + 1) * 24)) for epoch in range(5)]
    streams = [stream_of(epoch) for epoch in epochs]
    places = [[stream.index(row[0]) for row in epoch] for stream, epoch in zip(streams, epochs, strict=True)]
    assert len(set(map(tuple, streams))) == 5  # documents are shuffled
    assert len(set(map(tuple, places))) == 5  # and then samples
    assert all(order != sorted(order) for order in places)


def test_the_order_follows_from_the_seed_alone(tmp_path: Path) -> None:
    def order(folder: Path, seed: int) -> list[list[int]]:
        return rows(mixture_of(data_config(folder, folder / "set", train__seed=seed)), range(48))

    write_dataset(tmp_path / "here" / "set", LENGTHS)
    write_dataset(tmp_path / "there" / "set", LENGTHS)
    first = order(tmp_path / "here", 7)
    assert order(tmp_path / "here", 7) == order(tmp_path / "there", 7) == first
    following = order(tmp_path / "here", 8)
    assert following != first
    assert following[:24] != first[24:]  # a seed's second epoch is not the next one's first


def blend(folder: Path, weights: Sequence[float], lengths: Sequence[int] = LENGTHS) -> list[tuple[float, Path]]:
    """Write a dataset for every weight; the tokens of dataset i begin at 1000 i."""
    for index in range(len(weights)):
        write_dataset(folder / str(index), lengths, first=1000 * index)
    return [(weight, folder / str(index)) for index, weight in enumerate(weights)]


@pytest.mark.parametrize("weights", [[1], [0.6, 0.3, 0.1]])
def test_a_longer_run_begins_with_the_same_samples(tmp_path: Path, weights: list[float]) -> None:
    config = data_config(tmp_path, blend(tmp_path, weights))
    runs = [rows(mixture_of(config, "train", length), range(length)) for length in (3, 24, 25, 131)]
    for run in runs:
        assert run == runs[-1][: len(run)]


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6), st.integers(1, 150))
@settings(max_examples=15)
def test_a_blend_keeps_to_its_shares(weights: list[float], length: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        samples = mixture_of(data_config(Path(name), blend(Path(name), weights)))
        sources = [row[0] // 1000 for row in rows(samples, range(length))]
    for seen in range(1, length + 1):
        counts = Counter(sources[:seen])
        for index, weight in enumerate(weights):
            share = weight / sum(weights)
            assert abs(counts[index] - seen * share) <= 2 + 1e-9


def test_a_blend_takes_each_datasets_own_order(tmp_path: Path) -> None:
    sources = blend(tmp_path, [2, 1])
    mixed = rows(mixture_of(data_config(tmp_path, sources)), range(90))
    for index, (_, prefix) in enumerate(sources):
        alone = rows(mixture_of(data_config(tmp_path, prefix)), range(60))
        taken = [row for row in mixed if row[0] // 1000 == index]
        assert taken == alone[: len(taken)]


@given(st.integers(20, 60), st.floats(0.05, 0.95))
@settings(max_examples=20)
def test_train_and_valid_share_the_documents(count: int, share: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_dataset(Path(name) / "set", [2 * SEQUENCE] * count)
        config = data_config(Path(name), Path(name) / "set", data__split=[share, 1 - share])
        documents = []
        for split in ("train", "valid"):
            samples = mixture_of(config, split)
            seen = chain(*rows(samples, range(samples.samples_without_repetition())))
            documents.append({token // (2 * SEQUENCE) for token in seen})
    train, valid = documents
    assert not train & valid
    assert train | valid == set(range(count))
    assert abs(len(train) - share * count) <= 0.5 + 1e-9


def test_separate_validation_data_leaves_all_of_train_for_training(tmp_path: Path) -> None:
    write_dataset(tmp_path / "train", LENGTHS)
    write_dataset(tmp_path / "valid", LENGTHS, first=1000)
    config = data_config(tmp_path, tmp_path / "train", tmp_path / "valid", data__split=[0.5, 0.5])
    train, valid = (mixture_of(config, split) for split in ("train", "valid"))
    assert max(stream_of(rows(train, range(24)))) < 1000 <= min(stream_of(rows(valid, range(24))))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=4))
@settings(max_examples=20)
def test_validation_never_repeats(weights: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        sources = blend(Path(name), weights)
        samples = mixture_of(data_config(Path(name), sources, sources), "valid")
        most = samples.samples_without_repetition()
        labels = [label for row in rows(samples, range(most + 1)) for label in row[1:]]
    assert len(set(labels[:-SEQUENCE])) == len(labels) - SEQUENCE > len(set(labels)) - SEQUENCE
    assert most == pytest.approx(24 * sum(weights) / max(weights), abs=2 * sum(weights) / max(weights))


def test_new_documents_under_an_old_prefix(tmp_path: Path) -> None:
    config = data_config(tmp_path, tmp_path / "set")
    write_dataset(tmp_path / "set", LENGTHS)
    before = rows(mixture_of(config), range(24))
    write_dataset(tmp_path / "set", LENGTHS[::-1])
    after = rows(mixture_of(config), range(24))
    assert sorted(label for row in after for label in row[1:]) != after and after != before
    assert stream_of(after) != stream_of(before)


def test_another_split_of_the_same_documents(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    largest_token = {}
    for share in (0.9, 0.5):
        config = data_config(tmp_path, tmp_path / "set", data__split=[share, 1 - share])
        samples = mixture_of(config)
        largest_token[share] = max(max(row) for row in rows(samples, range(10)))
    bound = sum(LENGTHS[:6])
    assert largest_token[0.5] < bound <= largest_token[0.9]


@pytest.mark.parametrize(
    ("lengths", "split", "message"),
    [
        ([5, 3], [1, 0], "set: 8 tokens to train on, fewer than one sample of 8 \\+ 1  -> more data"),
        ([9] * 10, [0.99, 0.01], "set: 0 tokens to validate on, fewer than one sample"),
    ],
)
def test_too_little_data_is_refused(tmp_path: Path, lengths: list[int], split: list[float], message: str) -> None:
    write_dataset(tmp_path / "set", lengths)
    config = data_config(tmp_path, tmp_path / "set", data__split=split)
    with pytest.raises(DataError, match=message):
        mixture_of(config, "train" if split[1] == 0 else "valid").check()


def test_one_sample_is_enough(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", [9])
    samples = mixture_of(data_config(tmp_path, tmp_path / "set"))
    assert rows(samples, range(3)) == [list(range(9))] * 3


def test_a_missing_dataset_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    config = data_config(tmp_path, tmp_path / "set")
    (tmp_path / "set.bin").unlink()
    with pytest.raises(DataError, match=r"there is no file .*set\.bin  -> `megascale data prepare` makes it"):
        mixture_of(config).check()


def test_mock_samples_follow_from_seed_split_and_number(tmp_path: Path) -> None:
    def samples(seed: int, split: str) -> list[list[int]]:
        made = build_mixture(mixture_spec(data_config(tmp_path, train__seed=seed), split))
        assert isinstance(made, MockMixture)
        return rows(made, range(20))

    first = samples(1, "train")
    assert samples(1, "train") == first
    others = [samples(1, "valid"), samples(2, "train"), samples(2, "valid"), first]
    assert len({tuple(map(tuple, other)) for other in others}) == 4
    assert all(len(row) == SEQUENCE + 1 and min(row) >= 0 and max(row) < VOCABULARY for row in first)


def test_a_token_outside_the_model_s_vocabulary_is_refused(tmp_path: Path) -> None:
    """Datasets of other tools do not record their vocabulary. The last token is only ever a label."""
    write_dataset(tmp_path / "set", [17], first=100)
    assert len(rows(mixture_of(data_config(tmp_path, tmp_path / "set", model__vocab_size=117)), [0, 1])) == 2
    samples = mixture_of(data_config(tmp_path, tmp_path / "set", model__vocab_size=116))
    with pytest.raises(DataError, match=r"has token 116; model\.vocab_size is 116"):
        rows(samples, [0, 1])


@pytest.mark.parametrize("token", [-1, -2, -(2**31)])
@pytest.mark.parametrize("place", [0, 5, 16])
def test_a_negative_token_is_refused(token: int, place: int, tmp_path: Path) -> None:
    """megatron-core takes -1 for padding, and would read token 0 and leave the label out of the loss."""
    write_dataset(tmp_path / "set", [17])
    config = data_config(tmp_path, tmp_path / "set")
    ids = np.arange(17, dtype=np.int32)
    ids[place] = token
    ids.tofile(tmp_path / "set.bin")
    index = bytearray((tmp_path / "set.idx").read_bytes())
    index[17] = 4  # i32
    (tmp_path / "set.idx").write_bytes(index)
    with pytest.raises(DataError, match=rf"has token {token}; model\.vocab_size is {VOCABULARY}"):
        rows(mixture_of(config), [0, 1])


def test_a_small_dataset_repeated_ten_thousand_times_writes_nothing(tmp_path: Path) -> None:
    samples = mixture_of(data_config(tmp_path, blend(tmp_path, [1, 3], [20, 13])), "train", 40_000)
    rows(samples, range(320))
    before = len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())
    rows(samples, range(39_680, 40_000))
    after = len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())
    assert all(now < then + 8 for then, now in zip(before, after, strict=True))
    assert not (tmp_path / "cache").exists()


def test_a_dataset_that_changes_under_a_run_is_named(tmp_path: Path) -> None:
    """It is mapped: a page that a cut has left reads as zeros."""
    write_dataset(tmp_path / "set", LENGTHS)
    samples = mixture_of(data_config(tmp_path, tmp_path / "set"))
    rows(samples, [0])
    path = tmp_path / "set.idx"
    with open(path, "r+b") as file:
        size = file.seek(0, 2)
        file.seek(34)
        file.write(bytes(size - 34))
    with pytest.raises(DataError, match=rf"sample \d+ of {tmp_path}/set is not as its index says: ") as raised:
        rows(samples, range(24))
    assert raised.value.hint.startswith("files of a dataset must stay as they are"), "its small index is no file"


def test_reading_needs_neither_torch_nor_megatron_core(tmp_path: Path) -> None:
    """A process that reads for other processes starts in a fraction of a second."""
    code = "import sys, megascale.data.mix.mixture; print({'torch', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_tokens_that_occur_decide_not_those_that_could(tmp_path: Path) -> None:
    """The tokenizer has 60,000, more than the model: some special ones that no text has."""
    write_dataset(tmp_path / "set", [30, 34])
    data = {"data__mock": False, "data__train": str(tmp_path / "set"), "data__split": [1.0, 0.0]}

    def configured(vocab_size: int) -> RunConfig:
        model = GPT | {"vocab_size": vocab_size, "seq_length": SEQUENCE}
        return config_of(settings_of(model, tmp_path, **data), tmp_path)

    assert mixture_of(configured(64))[0].tokens.max() < 64
    hint = "data that this model's own tokenizer has prepared, or, for a new model, model.vocab_size = "
    with pytest.raises(ConfigError, match=f"63 is too few for token 63 of {tmp_path}/set  -> {hint}64"):
        configured(63)
    description = tmp_path / "set.json"
    facts = json.loads(description.read_text())
    del facts["highest_token"]  # as of earlier versions
    description.write_text(json.dumps(facts))
    with pytest.raises(
        ConfigError, match=r"64 is less than the 60000 tokens of the tokenizer of .*  -> prepare it again"
    ):
        configured(64)
