"""Measuring real steps: what is counted, what fits, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.account.memory import state_bytes
from megascale.bench import kernels, speed
from megascale.bench.mfu import Fit, Steps
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, MegascaleError
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.layout.tensors import layer
from megascale.layout.topology import Topology
from megascale.model import parts
from megascale.ops import select
from tests.runs import LLAMA, build_run, config_of, settings
from tests.worlds import run_world

CPU = Device(torch.device("cpu"), "gloo")
ROOT = Path(__file__).parents[2]
STEPS = Steps(warm_up=1, timed=20, profiled=2)
SMALL = ["model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_size=64",
         "model.vocab_size=128", "model.seq_length=32"]  # fmt: skip


def config(folder: Path, **overrides: Any) -> RunConfig:
    overrides = {"train__precision": "fp32", "train__steps": STEPS.total} | overrides
    return config_of(settings(LLAMA, folder, **overrides), folder)


def losses_of(rank: Rank, given: RunConfig) -> tuple[list[float], list[float]]:
    """By the benchmark, and by the trainer's own loop."""
    from tests.runs import train_curve

    _, losses = speed.time_steps(build_run(rank, given), 4)
    return losses, [loss for loss, _ in train_curve(rank, given, 4)]


def test_the_steps_are_those_of_training(tmp_path: Path) -> None:
    ((ours, theirs),) = run_world(1, losses_of, config(tmp_path))
    assert ours == theirs


def measured(rank: Rank, given: RunConfig, fit: bool = False) -> Any:
    torch.distributed.destroy_process_group()  # the world's: the benchmark opens one of its own
    said: list[str] = []
    found = speed.measure(given, given.model, STEPS, said.append, fit=fit)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return found, said


def test_a_run_is_measured(tmp_path: Path) -> None:
    ((found, said),) = run_world(1, measured, config(tmp_path))
    assert found.step.count == 20
    assert found.step.low <= found.step.median <= found.step.high
    assert found.tokens_per_s == pytest.approx(8 * 16 / found.step.median)
    assert found.machine.peak.flops > 0 and found.machine.attainable.flops > 0
    assert set(found.machine.backends.values()) == {"torch"}
    assert found.machine.backends.keys() == {
        "linear", "attention", "rope", "norm", "add_norm", "activation", "cross_entropy", "wgrad", "optimizer",
    }  # fmt: skip
    assert found.kernels["communication"] == found.kernels["quantise"] == 0
    for purpose in ("gemm", "attention", "norms", "activation", "rope", "loss", "optimizer", "other"):
        assert found.kernels[purpose] > 0, purpose
    assert sum(found.kernels.values()) == pytest.approx(1.0)  # operators of one thread, and what lies between them
    assert found.losses[0] == pytest.approx(4.6, abs=0.1)  # of 101 tokens, any as likely
    assert len(said) == 2
    assert not (tmp_path / "test").exists()  # no run's folder was made


def backends(rank: Rank, given: RunConfig) -> tuple[dict[str, str], set[str]]:
    """Of the benchmark, and those that were built."""
    built: set[str] = set()
    build = select.build

    def watched(operation: str, setting: select.Setting) -> Any:
        built.add(f"{operation} {select.select(operation, setting).backend}")
        return build(operation, setting)

    select.build = parts.build = watched
    run = build_run(rank, given)
    return speed._Bench(Rank(0, 1, 0, "here"), CPU, STEPS, lambda text: None).backends(run), built


@pytest.mark.parametrize(
    ("overrides", "compiled"),
    [
        ({"train__precision": "fp8", "backends__linear": "compile"}, {"linear"}),
        ({"train__compile": True}, {"norm", "activation"}),
    ],
)
@pytest.mark.slow
def test_the_backends_are_those_that_ran(overrides: dict[str, Any], compiled: set[str], tmp_path: Path) -> None:
    ((named, built),) = run_world(1, backends, config(tmp_path, **overrides))
    assert {f"{operation} {name}" for operation, name in named.items()} == built
    assert {operation for operation, name in named.items() if name == "compile"} == compiled


def test_without_profiled_steps_there_are_no_shares(tmp_path: Path) -> None:
    (found,) = run_world(1, shares_of_none, config(tmp_path))
    assert found == {}


def shares_of_none(rank: Rank, given: RunConfig) -> dict[str, float]:
    return speed.profile_steps(build_run(rank, given), 0, 1.0)


def saved(rank: Rank, given: RunConfig) -> int:
    return speed._saved_by_layer(build_run(rank, given))


def test_what_a_layer_keeps_is_counted_tensor_by_tensor(tmp_path: Path) -> None:
    """A llama's layer in fp32 keeps, for each token: its input, what each of two norms makes of it and their scales,
    q, k and v as rotated, what attention gives, with the logarithms of its sums, and as its product takes it, the
    stream between, gate and up, and what the activation gives.
    """
    h, heads, kv, d, ffn, tokens = 32, 4, 2, 8, 48, 16
    numbers = h + (h + 1) + (heads + 2 * kv) * d + (heads * d + heads) + h + (h + 1) + 2 * ffn + ffn
    tables = 2 * tokens * d // 2
    (found,) = run_world(1, saved, config(tmp_path, batch__global=1))
    assert found == pytest.approx(4 * (tokens * numbers + tables), rel=0.15)
    (double,) = run_world(1, saved, config(tmp_path, batch__global=2, batch__micro=2))
    assert double == pytest.approx(2 * found, rel=0.05)


def fit(given: RunConfig, free: float, first: int) -> Fit:
    """On a device with `free` bytes, where a step of one layer takes `first`, and whose peak begins anew, as a GPU's,
    when memory is released.
    """
    peaks = [1000]
    Device.free_memory = lambda self: int(free)  # type: ignore[method-assign]
    Device.peak_memory = lambda self: peaks[-1]  # type: ignore[method-assign]
    Device.synchronize = lambda self: peaks.append(1000 + first)  # type: ignore[method-assign]
    Device.release_memory = lambda self: peaks.append(1000)  # type: ignore[method-assign]
    return speed._Bench(Rank(0, 1, 0, "here"), CPU, STEPS, lambda text: None).fit(given, 1000)


def fitted(rank: Rank, given: RunConfig, spare: float) -> Fit:
    """With room for one layer, and `spare` more."""
    first = 10_000_000
    layer = fit(given, 1e12, first).layer
    return fit(given, (first + spare * layer) / (1 - speed.RESERVE) + 1, first)


@pytest.mark.parametrize(("spare", "layers"), [(0.5, 1), (3.5, 4)])
def test_as_many_layers_as_the_memory_holds(spare: float, layers: int, tmp_path: Path) -> None:
    given = config(tmp_path, train__precision="bf16")
    (found,) = run_world(1, fitted, given, spare)
    assert found.layers == layers and found.first == 10_000_000
    two, three = (
        state_bytes(given.model_copy(update={"model": given.model.model_copy(update={"num_layers": n})}), 0).total
        for n in (2, 3)
    )
    assert found.state == three - two
    assert found.layer > found.state


def test_in_fp8_every_further_layer_is_cast(tmp_path: Path) -> None:
    """Two bytes more for each of its weights than in bf16, whatever the ends of the whole model are."""
    given = config(tmp_path, train__precision="fp8")
    (cast,) = run_world(1, fitted, given, 3.5)
    (plain,) = run_world(1, fitted, config(tmp_path, train__precision="bf16"), 3.5)
    matrices = sum(p.local_numel(Topology()) for p in layer(given.model, 0) if p.fp8)
    assert cast.state - plain.state == 2 * matrices


def sized(rank: Rank, given: RunConfig, layers: int) -> str:
    """What is said where so many layers fit."""
    speed._Bench.fit = lambda self, config, whole: Fit(whole, layers, 1, 1, 1)  # type: ignore[method-assign]
    speed._Bench.run = lambda self, config, *_: "it runs"  # type: ignore[assignment,method-assign,return-value]
    torch.distributed.destroy_process_group()
    try:
        return str(speed.measure(given, given.model, STEPS, lambda text: None, fit=True))
    except ConfigError as error:
        return str(error)
    finally:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def test_layers_that_fit_break_no_rule(tmp_path: Path) -> None:
    given = config(tmp_path, train__precision="fp8")
    (said,) = run_world(1, sized, given, 2)
    assert "--layers fit: 2 of 4 layers  fp8.bf16_first: the first 1 and last 1 of 2 layers leave none in fp8" in said
    assert run_world(1, sized, given, 3) == ["it runs"]
    copied = config(tmp_path, checkpoint__every=4, checkpoint__memory_every=2, checkpoint__replicate=True)
    assert run_world(1, sized, copied, 2) == ["it runs"], "nothing is saved, nor copied"
    cut = config(tmp_path, model__window=[7, 0, 7], parallel__layers_per_chunk=[4])
    assert run_world(1, sized, cut, 2) == ["it runs"], "windows and chunks are those of the layers that fit"


def further(rank: Rank, given: RunConfig) -> int:
    found = fit(given, 1e12, 10_000_000)
    return found.layer - found.state


def test_a_further_layer_that_is_computed_again_keeps_its_input(tmp_path: Path) -> None:
    given = config(tmp_path, train__precision="bf16", train__recompute="full")
    (found,) = run_world(1, further, given)
    assert found == 2 * given.batch.micro * given.model.seq_length * given.model.hidden_size


def test_a_further_layer_is_the_one_whose_window_keeps_most(tmp_path: Path) -> None:
    found = {}
    for window in (4, 0, (4, 0), (0, 4)):
        given = config(tmp_path, model__window=window if isinstance(window, int) else list(window))
        (found[window],) = run_world(1, further, given)
    assert found[4] != found[0]
    assert found[4, 0] == found[0, 4] == max(found[4], found[0])


def optimizing(rank: Rank, given: RunConfig) -> set[tuple[str, str]]:
    run = build_run(rank, given)
    found = kernels.profile(lambda: speed.time_steps(run, 1), run.device)
    return {(kernel.name, kernels.classify(kernel.name, kernel.within)) for kernel in found.kernels}


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_all_of_the_optimizer_is_counted_as_its(tmp_path: Path, name: str) -> None:
    (found,) = run_world(1, optimizing, config(tmp_path, optimizer__name=name))
    only = {"aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_foreach_mul_"}
    assert {purpose for kernel, purpose in found if kernel in only} == {"optimizer"}


def casting(rank: Rank, given: RunConfig) -> tuple[dict[str, float], Counter[str]]:
    """The shares of a step by purpose, and how many operators each has."""
    run = build_run(rank, given)
    profile = kernels.profile(lambda: speed.time_steps(run, 1), run.device)
    return kernels.shares(profile, 1.0), Counter(kernels.classify(k.name, k.within) for k in profile.kernels)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_casts_have_a_share_of_their_own(tmp_path: Path, recipe: str) -> None:
    wanted = {"train__precision": "fp8", "fp8__recipe": recipe, "fp8__bf16_first": 0, "fp8__bf16_last": 0}
    ((shares, operators),) = run_world(1, casting, config(tmp_path, **wanted))
    assert shares["quantise"] > 0 and shares["copies"] > 0
    assert operators["quantise"] > operators["copies"]


def test_what_does_not_fit_a_cpu_is_told_before_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "free_memory", lambda self: 10_000)
    with pytest.raises(MegascaleError, match=r"test with 4 layers does not fit the device's memory: it takes .* free"):
        speed._check_memory(config(tmp_path), Device(torch.device("cpu"), "gloo"))


def unfit(rank: Rank, given: RunConfig) -> str:
    with pytest.raises(MegascaleError) as caught:
        fit(given, 1000, 10_000)
    return str(caught.value)


def test_a_model_of_which_not_one_layer_fits(tmp_path: Path) -> None:
    (said,) = run_world(1, unfit, config(tmp_path))
    assert said.startswith("not one layer of test fits: 0 layers fit 900 B: one takes 9.77 KiB")
    assert said.endswith("-> a smaller batch.micro")


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried to allocate 20.00 GiB", "DefaultCPUAllocator: can't"])
def test_memory_that_runs_out_is_one_message(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise (torch.OutOfMemoryError if "CUDA" in words else RuntimeError)(words)

    monkeypatch.setattr(speed, "build", full)
    given = config(tmp_path)
    with pytest.raises(MegascaleError, match="test with 4 layers does not fit the device's memory  -> --layers fit"):
        speed.measure(given, given.model, STEPS, lambda text: None)
    assert not torch.distributed.is_initialized()


def bench_mfu(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megascale", "bench", "mfu", *words, *SMALL]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_command_measures_a_preset() -> None:
    done = bench_mfu("--preset", "llama3-1b", "--layers", "2", "--json", "train.precision=fp32")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)  # and nothing beside it
    assert (shown["layers"], shown["whole_layers"], shown["step_s"]["count"]) == (2, 16, 20)
    assert shown["config"]["train"]["steps"] == 28
    assert shown["kernels"]["gemm"] > 0


@pytest.mark.slow
def test_the_command_fits_a_preset_and_reads_files() -> None:
    done = bench_mfu("--preset", "llama3-3b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("llama3-3b: all 28 layers")
    assert "28 layers fit" in done.stdout
    done = bench_mfu("--config", str(ROOT / "configs/bench/llama3-8b-slice.toml"), "--profile", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("llama3-8b-slice: 8 of 32 layers")
