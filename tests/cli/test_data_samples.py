"""`data.skip_samples`, and the documents that a step has read: arithmetic equals what a run reads."""

from __future__ import annotations

import contextlib
import json
from itertools import accumulate
from pathlib import Path

import pytest

from megascale.cli.data_samples import samples_of_step, step_range
from megascale.cli.main import main
from megascale.config.batch_rampup import BatchSizes, batch_sizes
from megascale.config.run import RunConfig
from megascale.config.toml_writer import to_toml
from megascale.core.errors import DataError
from tests.data.datasets import data_config, mixture_of, write_dataset
from tests.data.read.test_decomposed_index import decomposed
from tests.jobs import Job, curve, finish, job_config
from tests.runs import GPT

LENGTHS = [13, 5, 1, 40, 8, 9, 30, 2, 21, 17, 16, 33]


def blend_config(folder: Path, **overrides: object) -> RunConfig:
    for number in (0, 1):
        write_dataset(folder / str(number), LENGTHS, first=1000 * number)
    sources = [(0.7, folder / "0"), (0.3, folder / "1")]
    return data_config(folder, sources, train__steps=40, **overrides)


def test_samples_in_skipped_ranges_are_left_out(tmp_path: Path) -> None:
    every = mixture_of(blend_config(tmp_path))
    config = blend_config(tmp_path, data__skip_samples=[[3, 5], [10, 30]])
    rest = mixture_of(config)
    order = [index for index in range(100) if not (3 <= index < 5 or 10 <= index < 30)]
    for position, index in enumerate(order):
        assert (rest[position].tokens == every[index].tokens).all() and rest.order(position) == index
    valid = data_config(tmp_path, tmp_path / "0", tmp_path / "1", data__skip_samples=[[0, 5]], train__eval_every=1)
    assert mixture_of(valid, "valid").order(0) == 0, "validation data is not in the order of training samples"


@pytest.mark.parametrize("skip", ["[[5, 5]]", "[[5, 3]]", "[[5, 9], [8, 10]]", "[[5, 9], [1, 2]]", "[[-1, 2]]"])
def test_ranges_that_do_not_ascend_are_refused(skip: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_config(tmp_path)
    assert main(["check", str(tmp_path / "config-in.toml"), f"data.skip_samples={skip}"]) == 2
    assert "data.skip_samples" in capsys.readouterr().err


def test_the_documents_of_a_step_are_those_of_its_samples(tmp_path: Path) -> None:
    config = blend_config(tmp_path, data__skip_samples=[[20, 100]])
    samples = mixture_of(config)
    documents = {number: sum(LENGTHS[:number]) for number in range(len(LENGTHS))}
    for step in (1, 3, 7, 30):
        found = samples_of_step(config, step)
        assert [sample.sample for sample in found] == list(range(8 * (step - 1), 8 * step))
        for sample in found:
            first = 1000 * (sample.dataset == str(tmp_path / "1"))
            tokens = [
                first + documents[piece.document] + token
                for piece in sample.pieces
                for token in range(piece.start, piece.stop)
            ]
            read = samples[sample.sample]
            assert tokens == [*read.tokens.tolist(), int(read.labels[-1])]
            assert sample.order == samples.order(sample.sample)
    assert max(sample.epoch for sample in found) > 1


def test_the_pieces_of_a_step_of_decomposed_documents(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS * 4)
    config = decomposed(tmp_path, train__steps=40)
    samples, firsts = mixture_of(config), list(accumulate(LENGTHS * 4, initial=0))
    for step in range(1, 21):
        found = samples_of_step(config, step)
        assert len({piece.stop - piece.start for sample in found for piece in sample.pieces}) == 1, "one length a step"
        for sample in found:
            parts = [range(firsts[p.document] + p.start, firsts[p.document] + p.stop) for p in sample.pieces]
            assert samples[sample.sample].tokens.tolist() == [token for part in parts for token in part]


def test_a_step_s_samples_when_the_batch_has_changed(tmp_path: Path) -> None:
    config = blend_config(tmp_path)
    assert [step_range(batch_sizes(config.batch), config.folder, step) for step in (1, 2, 40)] == [
        (0, 8),
        (8, 8),
        (312, 8),
    ]
    config.folder.mkdir(parents=True)
    records = [{"step": step, "samples": 4 * step} for step in (5, 10, 15)]
    records.append({"step": 10, "valid_loss": 1.0})
    records += [{"step": step, "samples": 6 * step - 20} for step in (15, 20)]  # of a resume with another batch
    lines = [json.dumps(record) for record in records]
    (config.folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 16, "sam']))
    assert [step_range(batch_sizes(config.batch), config.folder, step) for step in (1, 5, 6, 10, 11, 15)] == [
        (0, 4), (16, 4), (20, 4), (36, 4), (40, 6), (64, 6),
    ]  # fmt: skip
    assert step_range(batch_sizes(config.batch), config.folder, 22) == (108, 8), (
        "after the last record the configuration tells"
    )


def test_a_step_is_right_or_refused_if_the_batch_has_changed_between_two_records(tmp_path: Path) -> None:
    config = blend_config(tmp_path, batch__global=4, batch__micro=1)
    sizes = [0, *(8 * step for step in range(1, 16)), *(120 + 4 * step for step in range(1, 26))]
    config.folder.mkdir(parents=True)
    records = [json.dumps({"step": step, "samples": sizes[step]}) for step in (1, 10, 20, 30, 40)]
    (config.folder / "metrics.jsonl").write_text("\n".join(records))
    for step in (*range(1, 11), *range(21, 41)):
        assert step_range(batch_sizes(config.batch), config.folder, step) == (
            sizes[step - 1],
            sizes[step] - sizes[step - 1],
        )
    for step in range(11, 21):
        with pytest.raises(DataError, match="60 samples in steps 11 to 20, by another"):
            step_range(batch_sizes(config.batch), config.folder, step)


def test_weights_of_a_policy_need_all_records_from_the_first_step_on(tmp_path: Path) -> None:
    config = blend_config(tmp_path)
    config = config.model_copy(update={"data": config.data.model_copy(update={"blend_policy": "fixed"})})
    config.folder.mkdir(parents=True)
    changes = [{"step": 4, "place": 48, "mixture": {"0 a": {"weight": 0.1}, "1 b": {"weight": 0.9}}},
               {"step": 24, "place": 208, "mixture": {"0 a": {"weight": 0.6}, "1 b": {"weight": 0.4}}}]  # fmt: skip
    steps = [{"step": step, "samples": 8 * step} for step in (1, 10, 20, 30)]
    earlier, later = [steps[0], changes[0], *steps[1:3]], [changes[1], steps[3]]
    write = (config.folder / "metrics.jsonl").write_text
    write("\n".join(map(json.dumps, [*earlier, *later])))
    found = {step: samples_of_step(config, step) for step in (12, 28)}
    write("\n".join(map(json.dumps, later)))  # of a run that began from another one's checkpoint
    with pytest.raises(DataError, match=r"metrics\.jsonl begins with step 30: .*  -> put the records of the run"):
        samples_of_step(config, 28)
    write("\n".join(map(json.dumps, [*earlier, *later])))
    assert {step: samples_of_step(config, step) for step in found} == found


@pytest.mark.parametrize("every", [1, 20, 33])
@pytest.mark.parametrize("batch", [{"global": 16, "rampup": [2, 2, 600]}, {"global": 8, "rampup": [2, 6, 600]}])
def test_a_step_of_another_ramp_up_is_right_or_refused(every: int, batch: dict[str, object], tmp_path: Path) -> None:
    """Steps of a ramp-up whose run was resumed, or started again when it was done, with another batch."""
    config, sizes = blend_config(tmp_path, **{f"batch__{key}": value for key, value in batch.items()}), [0]
    before = BatchSizes(8, 2, 2, 600)
    for _ in range(400):
        sizes.append(sizes[-1] + before.at(sizes[-1]))
    config.folder.mkdir(parents=True)
    records = [json.dumps({"step": step, "samples": sizes[step]}) for step in range(every, 401, every)]
    (config.folder / "metrics.jsonl").write_text("\n".join(records))
    answered = set()
    for step in range(1, every * (400 // every) + 1):
        with contextlib.suppress(DataError):
            assert step_range(batch_sizes(config.batch), config.folder, step) == (
                sizes[step - 1],
                sizes[step] - sizes[step - 1],
            )
            answered.add(step)
    assert {*range(280, 396)} < answered, "the full batch"
    assert every != 1 or len(answered) == 400
    assert every != 20 or 130 in answered
    if every == 33:
        with pytest.raises(DataError, match=r"by another batch\.global or batch\.rampup than those of its config"):
            step_range(batch_sizes(config.batch), config.folder, 100)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = blend_config(tmp_path, data__skip_samples=[[8, 16]])
    run = config.folder
    run.mkdir(parents=True)
    plugged = to_toml(config).replace("[data]\n", '[data]\nsample_weight = "a-plug-in-of-another-host"\n')
    (run / "config.toml").write_text(plugged)
    assert main(["data", "samples", str(run), "--step", "2"]) == 0
    note, *lines = capsys.readouterr().out.splitlines()
    assert note == "the records of the run end at step 0: by its configuration, step 2 reads"
    assert lines[0] == "step 2: samples 8 to 15, in the order of samples 16 to 23" and len(lines) == 9
    (run / "metrics.jsonl").write_text('{"step": 2, "samples": 16}')
    assert main(["data", "samples", str(run), "--step", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == lines, "a step in the records"
    assert main(["data", "samples", str(run), "--step", "41"]) == 3
    assert "has no step 41: train.steps is 40" in capsys.readouterr().err
    assert lines[1].startswith("16  ") and "  epoch 0  documents " in lines[1]
    assert main(["data", "samples", str(run), "--step", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["recorded"], len(facts["samples"]), facts["samples"][0]["order"]) == (2, True, 8, 16)
    assert main(["data", "samples", str(tmp_path), "--step", "2"]) == 2
    assert "not a run's folder: it has no config.toml" in capsys.readouterr().err
    with pytest.raises(DataError, match="mock data has no documents"):
        samples_of_step(data_config(tmp_path), 1)


@pytest.mark.slow
def test_ranges_are_skipped_in_every_layout_and_after_a_resume(tmp_path: Path) -> None:
    """A run that leaves out later samples from its start, and one that does so from a resume on with another layout."""
    write_dataset(tmp_path / "a", [60, 41, 33, 25] * 10)
    (tmp_path / "a.json").unlink()  # the description has a larger vocabulary than the model
    data = {"data__mock": False, "data__train": str(tmp_path / "a"), "data__split": [1.0, 0.0]}
    data |= {"optimizer__decay": "constant"}  # of which a run of four steps is the first half
    skip, curves = "data.skip_samples=[[32, 50], [60, 61]]", {}
    for name in ("whole", "resumed", "without"):
        (tmp_path / name).mkdir()
        config = job_config(tmp_path / name, GPT | {"vocab_size": 2000}, **data, checkpoint__every=3, train__steps=8)
        if name == "resumed":
            finish(config, "train.steps=4", "parallel.dp=2")
        curves[name] = curve(finish(config, *([] if name == "without" else [skip])))
    for (_, loss, norm), (_, expected, expected_norm) in zip(curves["resumed"], curves["whole"], strict=True):
        assert loss == pytest.approx(expected, rel=1e-10) and norm == pytest.approx(expected_norm, rel=1e-8)
    assert curves["without"][3][1] == curves["whole"][3][1] and curves["without"][4][1] != curves["whole"][4][1]
    status, _, err = Job(job_config(tmp_path / "whole", GPT | {"vocab_size": 2000}, **data, train__steps=9)).end()
    assert status == 2 and "data.skip_samples: differs from the checkpoint's [[32, 50], [60, 61]] below " in err
