"""MFU of real steps: memory, layers that fit, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.bench import mfu_memory, mfu_run, timed_steps
from megascale.bench.mfu import LayerFit, StepCounts
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.config.run import RunConfig
from megascale.core.errors import MegascaleError
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.layout.parameters import layer_params
from megascale.layout.topology import Topology
from megascale.model import layer_ops
from megascale.ops import select
from megascale.plan.account.state_bytes import state_bytes
from megascale.train import kernels
from megascale.train.op_context import op_context
from tests.marks import only_quick
from tests.runs import LLAMA, build_run, config_of, settings
from tests.worlds import run_world

CPU = Device(torch.device("cpu"), "gloo")
ROOT = Path(__file__).parents[2]
STEPS = StepCounts(warm_up=1, timed=20, profiled=2)
SMALL = ["model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_size=64",
         "model.vocab_size=128", "model.seq_length=32"]  # fmt: skip


def config(folder: Path, **overrides: Any) -> RunConfig:
    overrides = {"train__precision": "fp32", "train__steps": STEPS.total} | overrides
    return config_of(settings(LLAMA, folder, **overrides), folder)


def losses_of(rank: Rank, given: RunConfig) -> tuple[list[float], list[float]]:
    """Return the losses of the benchmark and of the trainer's own loop."""
    from tests.runs import train_curve

    _, losses = timed_steps.time_steps(build_run(rank, given), 4)
    return losses, [loss for loss, _ in train_curve(rank, given, 4)]


def test_the_steps_are_those_of_training(tmp_path: Path) -> None:
    ((ours, theirs),) = run_world(1, losses_of, config(tmp_path))
    assert ours == theirs


def measured(rank: Rank, given: RunConfig, fit: bool = False) -> Any:
    torch.distributed.destroy_process_group()  # the world's: the benchmark opens one of its own
    said: list[str] = []
    result = mfu_run.measure_mfu(given, given.model, STEPS, said.append, fit=fit)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return result, said


@pytest.mark.slow
def test_a_run_is_measured(tmp_path: Path) -> None:
    ((result, said),) = run_world(1, measured, config(tmp_path))
    assert result.step.count == 20
    assert result.step.low <= result.step.median <= result.step.high
    assert result.tokens_per_s == pytest.approx(8 * 16 / result.step.median)
    assert result.machine.peak.flops > 0 and result.machine.attainable.flops > 0
    assert set(result.machine.backends.values()) == {"torch"}
    assert result.machine.backends.keys() == {
        "linear", "attention", "rope", "norm", "add_norm", "activation", "cross_entropy", "wgrad", "optimizer",
    }  # fmt: skip
    assert result.kernels["communication"] == result.kernels["quantise"] == 0
    for purpose in ("gemm", "attention", "norms", "activation", "rope", "loss", "optimizer", "other"):
        assert result.kernels[purpose] > 0, purpose
    assert sum(result.kernels.values()) == pytest.approx(1.0)  # operators of one thread, and what lies between them
    assert result.losses[0] == pytest.approx(4.6, abs=0.1)  # of 101 tokens, any as likely
    assert len(said) == 2
    assert not (tmp_path / "test").exists()  # no run's folder was made


def backends(rank: Rank, given: RunConfig) -> tuple[dict[str, str], set[str]]:
    """Return the backends in the benchmark's result, and the backends in use."""
    built: set[str] = set()
    build = select.build_op

    def watched(operation: str, setting: select.OpContext) -> Any:
        built.add(f"{operation} {select.select_backend(operation, setting).backend}")
        return build(operation, setting)

    select.build_op = layer_ops.build_op = watched
    build_run(rank, given)
    return dict(select.selected_backends(op_context(given, CPU))), built


@pytest.mark.parametrize(
    ("overrides", "compiled"),
    [
        ({"train__precision": "fp8"}, set()),
        ({"train__compile": True}, {"norm", "add_norm", "activation", "rope"}),
    ],
)
@pytest.mark.slow
def test_the_backends_are_those_that_ran(overrides: dict[str, Any], compiled: set[str], tmp_path: Path) -> None:
    ((named, built),) = run_world(1, backends, config(tmp_path, **overrides))
    if "train__precision" not in overrides:
        built.add("linear torch")  # kernels are built for FP8 alone: GEMMs in other dtypes are torch's own
    assert {f"{operation} {name}" for operation, name in named.items()} == built
    assert {operation for operation, name in named.items() if name == "compile"} == compiled


def test_without_profiled_steps_there_are_no_shares(tmp_path: Path) -> None:
    (result,) = run_world(1, shares_of_none, config(tmp_path))
    assert result == {}


def shares_of_none(rank: Rank, given: RunConfig) -> dict[str, float]:
    return mfu_run.profile_steps(build_run(rank, given), 0, 1.0)


def saved(rank: Rank, given: RunConfig) -> int:
    return mfu_memory.saved_by_layer(build_run(rank, given))


def test_saved_tensors_of_a_layer_are_counted(tmp_path: Path) -> None:
    """A llama's layer in fp32 keeps, for each token: its input, what each of two norms makes of it and their scales,
    q, k and v as rotated, what attention gives, with the logarithms of its sums, and as its product takes it, the
    stream between, gate and up, and what the activation gives.
    """
    h, heads, kv, d, ffn, tokens = 32, 4, 2, 8, 48, 16
    numbers = h + (h + 1) + (heads + 2 * kv) * d + (heads * d + heads) + h + (h + 1) + 2 * ffn + ffn
    tables = 2 * tokens * d // 2
    (result,) = run_world(1, saved, config(tmp_path, batch__global=1))
    assert result == pytest.approx(4 * (tokens * numbers + tables), rel=0.15)
    (double,) = run_world(1, saved, config(tmp_path, batch__global=2, batch__micro=2))
    assert double == pytest.approx(2 * result, rel=0.05)


def fit(given: RunConfig, free: float, first: int) -> LayerFit:
    """On a device with `free` bytes, where a step of one layer takes `first`, and whose peak begins anew, as a GPU's,
    when memory is released.
    """
    peaks = [1000]
    Device.free_memory = lambda self: int(free)  # type: ignore[method-assign]
    Device.peak_memory = lambda self: peaks[-1]  # type: ignore[method-assign]
    Device.synchronize = lambda self: peaks.append(1000 + first)  # type: ignore[method-assign]
    Device.release_memory = lambda self: peaks.append(1000)  # type: ignore[method-assign]
    return mfu_memory.fit_layers(given, 1000, Rank(0, 1, 0, "here"), CPU, lambda text: None)


def fitted(rank: Rank, given: RunConfig, spare: float) -> LayerFit:
    """Fit layers on a device with memory for one layer and `spare` further layers."""
    first = 10_000_000
    layer = fit(given, 1e12, first).layer
    return fit(given, (first + spare * layer) / (1 - mfu_memory.RESERVED_SHARE) + 1, first)


@pytest.mark.parametrize(("spare", "layers"), [(0.5, 1), (3.5, 4)])
def test_as_many_layers_as_fit_in_memory(spare: float, layers: int, tmp_path: Path) -> None:
    given = config(tmp_path, train__precision="bf16")
    (result,) = run_world(1, fitted, given, spare)
    assert result.layers == layers and result.first == 10_000_000
    two, three = (
        state_bytes(given.model_copy(update={"model": given.model.model_copy(update={"num_layers": n})}), 0).total
        for n in (2, 3)
    )
    assert result.state == three - two
    assert result.layer > result.state


def test_in_fp8_every_further_layer_is_quantized(tmp_path: Path) -> None:
    """A further layer saves two bytes more per weight than in bf16, whatever the ends of the whole model are."""
    given = config(tmp_path, train__precision="fp8")
    (cast,) = run_world(1, fitted, given, 3.5)
    (plain,) = run_world(1, fitted, config(tmp_path, train__precision="bf16"), 3.5)
    matrices = sum(p.local_numel(Topology()) for p in layer_params(given.model, 0) if p.fp8)
    assert cast.state - plain.state == 2 * matrices


def sized(rank: Rank, given: RunConfig, layers: int) -> str:
    """Return the error for a number of layers that fit."""
    mfu_run.fit_layers = lambda config, whole, *_: LayerFit(whole, layers, 1, 1, 1)

    def runs(*_: Any) -> Any:
        raise MegascaleError("it runs")

    mfu_run.build_run = runs
    torch.distributed.destroy_process_group()
    try:
        mfu_run.measure_mfu(given, given.model, STEPS, lambda text: None, fit=True)
    except MegascaleError as error:
        return str(error)
    finally:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def test_layers_that_fit_break_no_rule(tmp_path: Path) -> None:
    given = config(tmp_path, train__precision="fp8")
    (said,) = run_world(1, sized, given, 2)
    assert (
        "--layers fit: 2 of 4 layers  fp8.first_layers_bf16: the first 1 and last 1 of 2 layers leave none in fp8"
        in said
    )
    assert run_world(1, sized, given, 3) == ["it runs"]
    copied = config(tmp_path, checkpoint__every=4, checkpoint__in_memory_every=2, checkpoint__replicate=True)
    assert run_world(1, sized, copied, 2) == ["it runs"], "nothing is saved, nor copied"
    cut = config(tmp_path, model__window=[7, 0, 7], parallel__layers_per_chunk=[4])
    assert run_world(1, sized, cut, 2) == ["it runs"], "windows and chunks are those of the layers that fit"


def further(rank: Rank, given: RunConfig) -> int:
    result = fit(given, 1e12, 10_000_000)
    return result.layer - result.state


def test_a_further_recomputed_layer_saves_its_input(tmp_path: Path) -> None:
    given = config(tmp_path, train__precision="bf16", train__recompute="full")
    (result,) = run_world(1, further, given)
    assert result == 2 * given.batch.micro * given.model.seq_length * given.model.hidden_size


def test_a_further_layer_has_the_window_with_the_most_memory(tmp_path: Path) -> None:
    result = {}
    for window in (4, 0, (4, 0), (0, 4)):
        given = config(tmp_path, model__window=window if isinstance(window, int) else list(window))
        (result[window],) = run_world(1, further, given)
    assert result[4] != result[0]
    assert result[4, 0] == result[0, 4] == max(result[4], result[0])


def optimizing(rank: Rank, given: RunConfig) -> set[tuple[str, str]]:
    run = build_run(rank, given)
    result = kernels.profile_kernels(lambda: timed_steps.time_steps(run, 1), run.device)
    return {(kernel.name, kernels.classify(kernel.name, kernel.enclosing)) for kernel in result.kernels}


@pytest.mark.parametrize("name", only_quick(OPTIMIZERS.names(), "adamw"))
def test_all_kernels_of_the_optimizer_count_as_optimizer(tmp_path: Path, name: str) -> None:
    options = {"rank": 16} if name == "compact" else {}
    (result,) = run_world(1, optimizing, config(tmp_path, optimizer__name=name, optimizer__options=options))
    only = {"aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_foreach_mul_", "aten::lerp", "aten::sign"}
    assert {purpose for kernel, purpose in result if kernel in only} == {"optimizer"}


def casting(rank: Rank, given: RunConfig) -> tuple[dict[str, float], Counter[str]]:
    """Return the shares of a step and the number of operators by purpose."""
    run = build_run(rank, given)
    profile = kernels.profile_kernels(lambda: timed_steps.time_steps(run, 1), run.device)
    return kernels.time_shares(profile, 1.0), Counter(kernels.classify(k.name, k.enclosing) for k in profile.kernels)


@pytest.mark.parametrize("recipe", only_quick(["tensorwise", "rowwise"]))
def test_quantization_has_a_separate_share(tmp_path: Path, recipe: str) -> None:
    wanted = {"train__precision": "fp8", "fp8__recipe": recipe, "fp8__first_layers_bf16": 0, "fp8__last_layers_bf16": 0}
    ((shares, operators),) = run_world(1, casting, config(tmp_path, **wanted))
    assert shares["quantise"] > 0 and shares["copies"] > 0
    assert operators["quantise"] > operators["copies"]


def test_a_model_too_large_for_a_cpu_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "free_memory", lambda self: 10_000)
    with pytest.raises(
        MegascaleError, match=r"test with 4 layers does not fit in the device's memory: it needs .* free"
    ):
        mfu_memory.check_memory(1 << 30, "test", 4, Device(torch.device("cpu"), "gloo"))


def unfit(rank: Rank, given: RunConfig) -> str:
    with pytest.raises(MegascaleError) as caught:
        fit(given, 1000, 10_000)
    return str(caught.value)


def test_a_model_without_a_layer_that_fits(tmp_path: Path) -> None:
    (said,) = run_world(1, unfit, config(tmp_path))
    assert said.startswith("one layer of test does not fit: 0 layers fit in 900 B: the first takes 9.77 KiB")
    assert said.endswith("-> give a smaller batch.micro")


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried to allocate 20.00 GiB", "DefaultCPUAllocator: can't"])
def test_out_of_memory_is_one_message(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise (torch.OutOfMemoryError if "CUDA" in words else RuntimeError)(words)

    monkeypatch.setattr(mfu_run, "build_run", full)
    given = config(tmp_path)
    with pytest.raises(
        MegascaleError, match="test with 4 layers does not fit in the device's memory  -> give --layers fit"
    ):
        mfu_run.measure_mfu(given, given.model, STEPS, lambda text: None)
    assert not torch.distributed.is_initialized()


def bench_mfu(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megascale", "bench", "mfu", *words, *SMALL]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
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
