"""`megascale bench mfu`: its arithmetic, its table, and what it refuses. Runs of it: tests/bench/test_mfu_run.py."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from pathlib import Path

import pytest

from megascale.bench.mfu import (
    CONVENTIONS,
    DeviceSetup,
    LayerFit,
    MfuResult,
    StepCounts,
    model_with_layers,
    preset_tree,
    table,
)
from megascale.bench.quartiles import Quartiles
from megascale.catalog.accelerators import Peak, stated_peak
from megascale.catalog.presets import PRESETS
from megascale.cli.bench import _mfu_config
from megascale.cli.main import main
from megascale.config.loading import load_config_tree
from megascale.layout.chunks import fp8_layers
from megascale.plan.account.flops import token_flops
from tests.runs import GPT, settings, write_config

GPU = "NVIDIA H100 80GB HBM3"


def speed(layers: int = 8, seconds: float = 0.5, recompute: str = "none") -> MfuResult:
    """llama3-8b on an H100 that takes `seconds` for a step of 4 x 8,192 tokens; products attain 700 TFLOP/s."""
    config = load_config_tree(preset_tree("llama3-8b"), "test", ["train.steps=28", f"model.num_layers={layers}"])
    config = config.model_copy(update={"train": config.train.model_copy(update={"recompute": recompute})})
    peak = stated_peak(GPU, "bf16")
    assert peak is not None
    attainable = Peak(700e12, "8192x4096x28672 in bf16, measured")
    machine = DeviceSetup(GPU, "2.13.0", {"attention": "torch", "norm": "liger"}, peak, attainable)
    kernels = {"gemm": 0.7, "attention": 0.15, "optimizer": 0.1, "copies": 0.0001, "idle": 0.0499}
    step = Quartiles(seconds, 0.99 * seconds, 1.01 * seconds, 20)
    return MfuResult(
        config, model_with_layers(config.model, 32), None, machine, 5, step, (12.1, 12.0), 70 << 30, kernels
    )


def test_utilisation_is_the_models_flops_over_the_peak() -> None:
    result = speed(seconds=0.5)
    flops = token_flops(result.config.model)
    assert result.tokens_per_s == 4 * 8192 / 0.5
    for convention in CONVENTIONS:
        rate = getattr(flops, convention) * 4 * 8192 / 0.5
        assert result.utilisation["mfu"][convention] == pytest.approx(rate / 989.4e12)
        assert result.utilisation["hfu"][convention] == pytest.approx(rate / 989.4e12)
        assert result.utilisation["of_attainable"][convention] == pytest.approx(rate / 700e12)


def test_recomputation_adds_hardware_flops() -> None:
    plain, full = speed(), speed(recompute="full")
    assert full.utilisation["mfu"] == plain.utilisation["mfu"]
    ours, theirs = full.utilisation["hfu"]["full"], plain.utilisation["hfu"]["full"]
    assert ours is not None and theirs is not None
    head, model = plain.head_share(8), plain.config.model
    last = 6 * model.num_layers * model.hidden_size * model.ffn_size / token_flops(model).full
    assert ours / theirs == pytest.approx(
        1 + (1 - head - last) / 3
    )  # except for the head and the last GEMM of every block


def test_a_slice_states_the_share_of_its_head() -> None:
    result = speed(layers=8)
    assert result.head_share(8) > 2 * result.head_share(32)
    assert result.head_share(32) == 6 * 4096 * 128_256 / token_flops(model_with_layers(result.config.model, 32)).full
    first = table(result).splitlines()[0]
    assert first == (
        "llama3-8b: 8 of 32 layers (head: 19% of the FLOPs, 5% in the whole model), 2.80B parameters, bf16"
    )
    assert "all 32 layers" in table(speed(layers=32))


def test_a_slice_has_the_windows_of_its_first_layers(tmp_path: Path) -> None:
    tree = settings(GPT, tmp_path, model__window=[7, 0], parallel__layers_per_chunk=[4], train__steps=28)
    path = write_config(tree, tmp_path / "run.toml")
    for layers, windows in (("1", (7,)), ("2", (7, None)), ("3", (7, None, 7))):
        result, whole = _mfu_config(Namespace(preset=None, config=str(path), overrides=[]), StepCounts(), layers)
        assert result.model.windows == windows
        assert result.parallel.layers_per_chunk is None
        assert whole.windows == (7, None, 7, None)


def test_a_slice_that_breaks_a_rule_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(settings(GPT, tmp_path, train__precision="fp8", train__steps=28), tmp_path / "run.toml")
    assert main(["bench", "mfu", "--config", str(path), "--layers", "2"]) == 2
    assert "--layers 2  fp8.first_layers_bf16: the first 1 and last 1 of 2 layers leave none" in capsys.readouterr().err


def test_the_table() -> None:
    result = dataclasses.replace(speed(), fit=LayerFit(32, 70 << 30, 30 << 30, 5 << 30, 4 << 30))
    lines = table(result).splitlines()
    assert max(map(len, lines)) < 120
    said = (
        "9 layers fit in 70.00 GiB: the first takes 30.00 GiB, each further layer 5.00 GiB, of which 4.00 GiB is state"
    )
    assert lines[3] == said
    assert "step         500.0 ms  (quartiles 495.0..505.0)" in lines
    assert "tokens/s     65,536" in lines
    (mfu,) = [line for line in lines if line.startswith("MFU")]
    assert mfu.endswith("of 989.4 TFLOP/s (H100 bf16, stated)")
    (attainable,) = [line for line in lines if line.startswith("of attainable")]
    assert attainable.endswith("of 700.0 TFLOP/s (8192x4096x28672 in bf16, measured)")
    assert lines[-1] == "gemm           70.0%    attention      15.0%    optimizer      10.0%    idle            5.0%"


def test_without_a_peak_there_is_no_utilisation() -> None:
    result = speed()
    result = dataclasses.replace(
        result, machine=dataclasses.replace(result.machine, peak=None, attainable=None), kernels={}
    )
    shown = table(result)
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith(("MFU", "HFU", "of att"))] == ["n/a"] * 3
    assert "share of a step's time" not in shown
    assert json.loads(json.dumps(result.as_json()))["mfu"] == {"full": None, "causal": None}


def test_json_has_everything() -> None:
    shown = json.loads(json.dumps(speed().as_json()))
    assert (shown["layers"], shown["whole_layers"], shown["tokens"]) == (8, 32, 4 * 8192)
    assert shown["step_s"] == {"median": 0.5, "low": 0.495, "high": 0.505, "count": 20}
    assert shown["config"]["model"]["num_layers"] == 8
    assert shown["peak"]["flops"] == 989.4e12
    assert sum(shown["kernels"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("room", "layers"),
    [(29, 0), (30, 1), (34, 1), (35, 2), (54, 5), (55, 6), (500, 6)],
)
def test_layers_that_fit(room: int, layers: int) -> None:
    assert LayerFit(total_layers=6, available=room, first=30, layer=5, state=4).layers == layers


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_run_of_one_process(preset: str) -> None:
    config = load_config_tree(preset_tree(preset), "test", ["train.steps=28"])
    assert (config.world_size, config.train.precision, config.data.mock) == (1, "bf16", True)


def cast(preset: str, layers: int, *more: str) -> range:
    """Return the FP8 layers of a preset's slice."""
    settings = ["train.steps=28", "train.precision=fp8", f"model.num_layers={layers}", *more]
    config = load_config_tree(preset_tree(preset), "test", settings)
    return fp8_layers(config.model, config.train, config.fp8)


@pytest.mark.parametrize("preset", PRESETS)
def test_in_fp8_every_layer_of_a_preset_is_quantized(preset: str) -> None:
    depths = PRESETS[preset].get("mtp_layers", 0)
    assert [cast(preset, layers) for layers in (1, 2, 3)] == [range(layers + depths) for layers in (1, 2, 3)]


def test_bf16_layers_of_one_run_do_not_affect_the_next() -> None:
    assert cast("llama3-8b", 3, "fp8.last_layers_bf16=1") == range(2)
    assert cast("llama3-8b", 3) == range(3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--preset lama3-8b", "there is no preset 'lama3-8b'  -> did you mean 'llama3-8b'?"),
        ("--preset llama3-8b train.precison=fp32", "did you mean 'precision'?"),
        ("--preset llama3-8b parallel.tp=2", "the layout needs 2 processes  -> bench mfu runs on one device"),
        ("--preset llama3-8b --layers 33", "--layers: the model has 32 layers, not 33  -> give 1 to 32, or fit"),
        ("--config nowhere.toml", "nowhere.toml  there is no such file"),
    ],
)
def test_mistakes_are_found_before_anything_runs(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mfu", *words.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.endswith("1 problem\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--preset llama3-8b --steps 19", "'19' is too small: the median needs 20 timed steps or more"),
        ("--preset llama3-8b --layers most", "'most' is not an integer of 1 or more, nor fit"),
        ("--preset llama3-8b --config a.toml", "not allowed with argument"),
        ("", "one of the arguments --preset --config is required"),
    ],
)
def test_invalid_arguments_are_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "mfu", *words.split()])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
