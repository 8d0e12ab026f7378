"""Distillation: the loss and every gradient are those of the full KL, in every layout; the file of soft labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from megascale.cli.main import main
from megascale.comm.group import single_rank_group
from megascale.config.run import RunConfig
from megascale.config.teacher_file import TeacherHeader
from megascale.convert.huggingface import PretrainedWeights
from megascale.core.errors import ConfigError, DataError
from megascale.core.rank import Rank
from megascale.data.mix.mock_mixture import build_mixture
from megascale.data.mix.teacher import LabelRows, mock_labels, open_labels, write_labels
from megascale.layout import loss as layout_loss
from megascale.ops.cross_entropy import CrossEntropy, cross_entropy, gradient, soft_cap, statistics
from megascale.ops.distillation import SoftLabels
from megascale.parallel.linear_cross_entropy import linear_cross_entropy
from megascale.parallel.tp_overlap import TensorParallel
from megascale.parallel.vocabulary import VocabularyRange
from megascale.train.further_losses import further_metrics
from megascale.train.resume import load_initial_state
from megascale.train.run import StepResult
from megascale.train.run_splits import mixture_spec
from megascale.train.step import train_step
from tests.runs import GEMMA2, LLAMA, build_run, config_of, curve_of, settings
from tests.thread_world import run_threads

ALONE = Rank(0, 1, 0, "host")
SOFT = {"distill_teacher": "mock", "distill_alpha": 0.3, "distill_top_k": 7}
SMALL = LLAMA | {"init_std": 0.2}
EXPERTS = SMALL | {"experts": 8, "expert_ffn_size": 24, "router_score": "sigmoid"}
DEEPER = SMALL | {"mtp_layers": 1, "exits": [2]}
MODELS = {"llama": SMALL, "gemma2": GEMMA2 | {"init_std": 0.2}, "experts": EXPERTS, "deeper": DEEPER}

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tp": 2, "sp": True},
    "cp2": {"cp": 2},
    "pp2 zb": {"pp": 2, "schedule": "zb_h1"},
    "dp2 zero2": {"dp": 2, "zero": 2},
    "tp2": {"tp": 2},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "dp2 ep2": {"dp": 2, "ep": 2},
    "tp2 sp cp2 pp2": {"tp": 2, "sp": True, "cp": 2, "pp": 2},
    "pp2 dualpipev": {"pp": 2, "vpp": 2, "schedule": "dualpipev"},
}
QUICK = [("llama", "tp2 sp"), ("gemma2", "tp2"), ("llama", "cp2"), ("llama", "pp2 zb"), ("experts", "dp2 zero2")]
EVERY = [*(("llama", each) for each in LAYOUTS if each != "dp2 ep2"), ("experts", "dp2 ep2"), ("deeper", "pp2 vpp2")]


def configure(model: str, folder: Path, layout: Mapping[str, Any], **keys: Any) -> RunConfig:
    given = {
        "batch__global": 4, "train__steps": 3, "optimizer__warmup_steps": 0, "optimizer__clip_norm": 0.0,
        "parallel__zero": 0, **{f"train__{key}": value for key, value in SOFT.items()},
    } | {f"parallel__{key}": value for key, value in layout.items()}  # fmt: skip
    return config_of(settings(MODELS[model], folder, **given | keys), folder)


def train(run: Any) -> list[float]:
    """Train, and return losses, gradient norms and KL of each step, and its weights at the end."""
    found = []
    for _ in range(3):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        metrics = divergence(run, result)
        assert metrics["count"] == result.loss_tokens
        found += [result.loss, result.grad_norm, metrics["loss"]]
    run.buffers.finish_param_gather()
    return found


def divergence(run: Any, result: StepResult) -> dict[str, float]:
    """Return the metrics of the KL of a step."""
    config = run.config
    return further_metrics(config.model, config.train, run.progress.step, result.totals)["objectives"]["distillation"]


def gradients(run: Any) -> dict[str, np.ndarray]:
    """Return the gradients of the first step by name, on a single process."""
    train_step(run, run.train_loader.batch(0))
    run.buffers.finish_param_gather()
    return {spec.name: parameter.main_grad.numpy().copy() for parameter, spec in run.buffers.shards()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda model: run_threads(configure(model, tmp_path_factory.mktemp(model), {}), train)[0])


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("top_k", "alpha"), [(90, 0.4), (5, 1.0), (1, 0.2), (7, 0.0)])
def test_the_loss_and_gradients_are_those_of_the_full_kl(
    top_k: int, alpha: float, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding, masked labels and three chunks; with all 90 tokens the KL is that of the two distributions."""
    monkeypatch.setattr(layout_loss, "CHUNK_BYTES", 0)
    monkeypatch.setattr(layout_loss, "CHUNK_TOKENS", 8)
    s, b, h, vocabulary = 12, 2, 6, 90
    x, padded, teacher = (
        drawn(s, b, h, seed=0),
        torch.zeros(128, h, dtype=torch.float64),
        drawn(s, b, vocabulary, seed=2),
    )
    padded[:vocabulary] = drawn(vocabulary, h, seed=1)
    labels = torch.randint(vocabulary, (s, b), generator=torch.Generator().manual_seed(3))
    mask = (torch.rand(s, b, generator=torch.Generator().manual_seed(4)) > 0.3).double()
    log_probs, ids = teacher.log_softmax(-1).topk(top_k)
    target = torch.zeros_like(teacher).scatter_(-1, ids, torch.softmax(log_probs, -1))
    kernels = CrossEntropy(statistics, gradient, cap, z_loss=1e-2)
    leaves = [t.clone().requires_grad_() for t in (x, padded, x, padded)]
    soft = SoftLabels(ids.int(), log_probs, alpha)
    tp = TensorParallel(single_rank_group("tp"))
    losses = linear_cross_entropy(*leaves[:2], labels, mask, VocabularyRange(0, 128, 90), tp, kernels, soft)
    losses[0].backward()
    logits = soft_cap(leaves[2] @ leaves[3][:vocabulary].t(), cap)
    entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    divergence = kl_div(logits.log_softmax(-1), target, reduction="none").sum(-1).flatten()
    sums = [(each * mask.flatten()).sum() for each in (entropy, divergence)]
    assert losses.tolist() == pytest.approx([each.item() for each in sums], rel=1e-12)
    squares = 1e-2 * (logits.logsumexp(-1).square() * mask).sum()  # a term of its own
    ((1 - alpha) * sums[0] + alpha * sums[1] + squares).backward()
    for found, expected in zip(leaves[:2], leaves[2:], strict=True):
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)


def test_in_bf16_it_is_near() -> None:
    x, weight = drawn(8, 1, 32, seed=0), drawn(64, 32, seed=1) / 4
    log_probs, ids = drawn(8, 1, 64, seed=2).log_softmax(-1).topk(6)
    labels, tp = torch.arange(8).view(8, 1), TensorParallel(single_rank_group("tp"))
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        leaf = x.to(dtype).clone().requires_grad_()
        soft = SoftLabels(ids.int(), log_probs.float(), 0.5)
        head = weight.to(dtype).clone().requires_grad_()
        losses = linear_cross_entropy(leaf, head, labels, None, VocabularyRange(0, 64, 64), tp, cross_entropy, soft)
        losses[0].backward()
        assert leaf.grad is not None
        results.append((losses.detach().double(), leaf.grad.double()))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0.01, atol=0.01)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("model", "layout"), QUICK)
def test_layouts_are_the_same_run(model: str, layout: str, alone: Any, tmp_path: Path) -> None:
    for found in run_threads(configure(model, tmp_path, LAYOUTS[layout]), train):
        assert found == pytest.approx(alone(model), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), [each for each in EVERY if each not in QUICK])
def test_every_layout_is_the_same_run(model: str, layout: str, alone: Any, tmp_path: Path) -> None:
    for found in run_threads(configure(model, tmp_path, LAYOUTS[layout]), train):
        assert found == pytest.approx(alone(model), rel=1e-10)


@pytest.mark.parametrize("keys", [{"train__recompute": "full"}, {"data__sequence_chunk_tokens": 8}])
def test_recomputation_and_chunks_are_the_same_run(keys: dict[str, Any], alone: Any, tmp_path: Path) -> None:
    (found,) = run_threads(configure("llama", tmp_path, {}, **keys), train)
    assert found == pytest.approx(alone("llama"), rel=1e-10)


def bare(folder: Path) -> RunConfig:
    """The configuration of the run without a teacher."""
    keys = {"train__steps": 3, "optimizer__warmup_steps": 0, "optimizer__clip_norm": 0.0, "parallel__zero": 0}
    return config_of(settings(SMALL, folder, batch__global=4, **keys), folder)


def test_without_a_share_it_is_the_plain_run_bit_for_bit(tmp_path: Path) -> None:
    (expected,) = run_threads(bare(tmp_path), gradients)
    (without,) = run_threads(configure("llama", tmp_path, {}, train__distill_alpha=0.0), gradients)
    assert without.keys() == expected.keys()
    assert all(np.array_equal(without[name], expected[name]) for name in expected)
    (distilled,) = run_threads(configure("llama", tmp_path, {}), gradients)
    assert not any(np.array_equal(distilled[name], expected[name]) for name in expected)


def test_the_teacher_ends_after_a_step(tmp_path: Path) -> None:
    """Then the gradients are those of the next token alone, bit for bit."""

    def steps(run: Any) -> tuple[list[float], list[float]]:
        results = [train_step(run, run.train_loader.batch(run.progress.samples)) for _ in range(3)]
        run.buffers.finish_param_gather()
        return [each.totals["count of distillation"] for each in results], [each.grad_norm for each in results]

    for keys, expected in (({}, [64, 64, 0]), ({"batch__rampup": [2, 2, 4]}, [32, 32, 0])):
        config = configure("llama", tmp_path, {"dp": 2}, train__distill_until_step=2, optimizer__lr=1e-30, **keys)
        plain = configure("llama", tmp_path, {"dp": 2}, train__distill_alpha=0.0, optimizer__lr=1e-30, **keys)
        for found, without in zip(run_threads(config, steps), run_threads(plain, curve_of_norms), strict=True):
            assert found[0] == expected
            assert [a == b for a, b in zip(found[1], without, strict=True)] == [False, False, True]


def curve_of_norms(run: Any) -> list[float]:
    return [norm for _, norm in curve_of(run, 3)]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, of its configuration, and of soft labels by its checkpoint for four steps."""
    folder = tmp_path_factory.mktemp("taught")
    tree = settings(SMALL, folder, batch__global=4, train__steps=2, checkpoint__every=2, optimizer__warmup_steps=0)
    run = build_run(ALONE, config_of(tree, folder))
    curve_of(run, 2)
    run.checkpoints.save(run.progress)
    words = ["--checkpoint", str(folder / "test"), "--output", str(folder / "labels"), "train.distill_top_k=101"]
    assert main(["data", "teacher", str(folder / "config-in.toml"), *words, "train.steps=4"]) == 0
    return folder


def student(taught: Path, folder: Path, **keys: Any) -> RunConfig:
    given = {
        "name": "student", "batch__global": 4, "train__steps": 4, "train__distill_teacher": str(taught / "labels"),
        "train__distill_top_k": 101,
    }  # fmt: skip
    return config_of(settings(SMALL, folder, **(given | keys)), folder)


def test_a_student_like_the_teacher_has_no_divergence(taught: Path, tmp_path: Path) -> None:
    """It begins from the checkpoint, with soft labels of all tokens, and reads on where the checkpoint ended."""
    run = build_run(ALONE, student(taught, tmp_path, checkpoint__resume=str(taught / "test")))
    load_initial_state(run, PretrainedWeights)
    run.buffers.finish_param_gather()
    assert run.progress.samples == 8 and abs(first_divergence(run)) < 1e-9


@pytest.mark.parametrize("layout", ["tp2 sp cp2 pp2", "dp2 zero2"])
def test_every_layout_reads_the_same_file(layout: str, taught: Path, tmp_path: Path) -> None:
    (alone,) = run_threads(student(taught, tmp_path), first_divergence)
    keys = {f"parallel__{key}": value for key, value in LAYOUTS[layout].items()}
    found = run_threads(student(taught, tmp_path, batch__micro=2, **keys), first_divergence)
    assert alone > 0.01 and found == pytest.approx([alone] * len(found), rel=1e-10)


def first_divergence(run: Any) -> float:
    """Return the KL of the next step."""
    result = train_step(run, run.train_loader.batch(run.progress.samples))
    run.buffers.finish_param_gather()
    return divergence(run, result)["loss"]


def test_the_first_tokens_of_a_file_count(taught: Path, tmp_path: Path) -> None:
    """A file of more tokens for a label serves a run with fewer; they are the likeliest ones, in order."""
    ids = build_mixture(mixture_spec(student(taught, tmp_path), "train"))[3].ids
    (few, _), (every, log_probs) = (open_labels(str(taught / "labels"), k)(3, ids) for k in (5, 101))
    assert few.shape == (16, 5) and np.array_equal(few, every[:, :5])
    assert (np.diff(log_probs) <= 0).all() and np.exp(log_probs).sum(-1) == pytest.approx(1, abs=1e-5)
    assert all(sorted(row) == list(range(101)) for row in every)


def test_a_file_of_other_samples_is_refused(taught: Path, tmp_path: Path) -> None:
    config = student(taught, tmp_path)
    with pytest.raises(DataError, match="sample 2 has other tokens than the sample that the teacher"):
        open_labels(str(taught / "labels"), 5)(2, build_mixture(mixture_spec(config, "train"))[3].ids)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train__seed": 5}, "has seed = 1234, and this run needs 5"),
        ({"model__seq_length": 8}, "has seq_length = 16, and this run needs 8"),
        ({"train__steps": 5}, "has samples = 16, and this run needs 20"),
        ({"train__distill_top_k": 102, "model__vocab_size": 102}, "has top_k = 101, and this run needs 102"),
        ({"train__distill_teacher": "nowhere"}, "there is no file"),
        ({"train__distill_teacher": __file__}, "is no file of soft labels"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_the_run(
    keys: dict[str, Any], message: str, taught: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        student(taught, tmp_path, **keys)


def test_a_part_of_a_file_is_refused(taught: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes((taught / "labels").read_bytes()[:-1])
    with pytest.raises(ConfigError, match="bytes, and its header says"):
        student(taught, tmp_path, train__distill_teacher=str(part))


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    header = TeacherHeader(vocab_size=10, seq_length=4, seed=0, top_k=3, samples=2)
    rows = mock_labels(header, 0, np.arange(5))

    def labels() -> Iterator[tuple[np.ndarray, LabelRows]]:
        yield np.arange(5), rows
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        write_labels(tmp_path / "labels", header, labels())
    assert not list(tmp_path.iterdir())
    write_labels(tmp_path / "labels", header, [(np.arange(5), rows)] * 2)
    assert all(map(np.array_equal, open_labels(str(tmp_path / "labels"), 3)(1, np.arange(5)), rows))
    assert (tmp_path / "labels").stat().st_size == len(header.line) + 2 * (8 + 8 * 4 * 3)


def test_a_teacher_of_another_vocabulary_is_refused(
    taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(settings(SMALL | {"vocab_size": 50}, tmp_path, batch__global=4), tmp_path)
    words = ["--checkpoint", str(taught / "test"), "--output", str(tmp_path / "labels")]
    assert main(["data", "teacher", str(tmp_path / "config-in.toml"), *words]) != 0
    assert "has a vocabulary of 101 tokens, and the run one of 50" in capsys.readouterr().err
    assert not (tmp_path / "labels").exists()
