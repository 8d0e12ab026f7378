"""`megascale bench mfu` and `megascale bench gemm`: benchmarks of a device. Torch is imported when one starts."""

from __future__ import annotations

import argparse
import json

from megascale.bench import mfu
from megascale.cli.arguments import add_json, at_least, checked, non_negative_int, positive_int, read_digits
from megascale.cli.command_output import print_progress
from megascale.config.loading import check_rules, load_config, load_config_tree
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Exit, MegascaleError, Problem
from megascale.core.process import exit_on_stop_signals
from megascale.operate.node import environment


def add_mfu(one: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench mfu`."""
    _, blank, about_slices = (mfu.__doc__ or "").partition("\n\n")
    one.description = f"{one.description}{blank}{about_slices}"
    which = one.add_mutually_exclusive_group(required=True)
    which.add_argument("--preset", metavar="NAME", help="a preset model, on random tokens in bf16")
    which.add_argument("--config", metavar="FILE", help="a run's TOML file")
    one.add_argument("overrides", metavar="key=value", nargs="*", help="override a setting, as section.key=value")
    one.add_argument(
        "--layers", type=_layers, metavar="N|fit", help="number of layers; fit: as many as fit in memory (default: fit "
        "with --preset, model.num_layers with --config)",
    )  # fmt: skip
    steps, warm, profiled = mfu.MIN_TIMED_STEPS, mfu.WARM_UP_STEPS, mfu.PROFILED_STEPS
    timed = at_least(steps, f"the median needs {steps} timed steps or more")
    steps_help = f"timed steps, at least {steps} (default: {steps})"
    one.add_argument("--steps", type=timed, default=steps, metavar="N", help=steps_help)
    warm_up = f"untimed steps first (default: {warm})"
    one.add_argument("--warm-up", type=positive_int, default=warm, metavar="N", help=warm_up)
    profile = f"profiled steps last (default: {profiled})"
    one.add_argument("--profile", type=non_negative_int, default=profiled, metavar="N", help=profile)
    add_json(one)


def run_mfu(options: argparse.Namespace) -> int:
    """Measure the MFU of a preset or a configuration file."""
    environment.set_defaults()
    with exit_on_stop_signals():
        steps = mfu.StepCounts(options.warm_up, options.steps, options.profile)
        layers = options.layers or ("fit" if options.preset else None)
        config, whole = _mfu_config(options, steps, layers)
        from megascale.bench.mfu_run import measure_mfu

        result = measure_mfu(config, whole, steps, print_progress, fit=layers == "fit")
        print(json.dumps(result.as_json()) if options.json else mfu.table(result))
    return Exit.OK


def _mfu_config(
    options: argparse.Namespace, steps: mfu.StepCounts, layers: str | None
) -> tuple[RunConfig, ModelConfig]:
    """Load the configuration to run and the whole model of which the run may use a slice.

    Raises: ConfigError with every mistake
    """

    def read(*more_overrides: str) -> RunConfig:
        words = [*options.overrides, *more_overrides]
        if options.preset:
            return load_config_tree(mfu.preset_tree(options.preset), "--preset", [*words, enough])
        return load_config(options.config, words)

    enough = f"train.steps={steps.total}"
    config = read()
    if config.train.steps < steps.total:
        config = read(enough)
    if config.world_size != 1:
        message = f"the layout needs {config.world_size} processes"
        hint = "bench mfu runs on one device: set tp, pp and dp to 1"
        raise ConfigError([Problem(options.config or "command line", "parallel", message, hint)])
    whole = mfu.whole_model(config.model)
    if layers is not None and layers != "fit":
        if int(layers) > whole.num_layers:
            hint = f"give 1 to {whole.num_layers}, or fit"
            message = f"the model has {whole.num_layers} layers, not {layers}"
            raise ConfigError([Problem("command line", "--layers", message, hint)])
        config = mfu.config_with_layers(config, int(layers))
        check_rules(config, f"--layers {layers}")
    return config, whole


def add_gemm(one: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench gemm`."""
    size = checked("a GEMM shape: give MxKxN, such as 8192x4096x14336", _size)
    one.add_argument(
        "--sizes", nargs="+", type=size, metavar="MxKxN", help="x [m, k] times weight [n, k] (default: squares, and "
        "on a GPU the GEMMs of llama3-8b and gpt3-175b with micro-batches of 8,192 tokens)",
    )  # fmt: skip
    one.add_argument(
        "--dtypes", nargs="+", metavar="NAME", help="fp64, fp32, tf32, bf16; fp8 (a scale per row), fp8_tensorwise "
        "(a scale per tensor); fp8_fast, fp8_tensorwise_fast (with fast accumulation); mxfp8, nvfp4 (Blackwell)",
    )  # fmt: skip
    add_json(one)


def run_gemm(options: argparse.Namespace) -> int:
    """Measure the GEMM throughput of every shape in every dtype."""
    environment.set_defaults()
    with exit_on_stop_signals():
        from megascale.bench import gemm
        from megascale.device import detect_device

        for name in options.dtypes or ():
            if name not in gemm.FORMATS:
                hint = f"choose from {', '.join(gemm.FORMATS)}"
                raise ConfigError([Problem("command line", "--dtypes", f"unknown dtype {name!r}", hint)])
        device = detect_device()
        shapes = [gemm.GemmShape(*size) for size in options.sizes] if options.sizes else gemm.default_shapes(device)
        measured = list(gemm.measure_rates(shapes, options.dtypes or gemm.default_formats(device), device))
        print(json.dumps(gemm.as_json(measured, device)) if options.json else gemm.table(measured, device))
        if all(rate.rate is None for rate in measured):
            what = f"no GEMM could be measured: {measured[0].unsupported_reason}"
            raise MegascaleError(what, hint="give other --sizes or --dtypes")
    return Exit.OK


def _layers(text: str) -> str:
    if text == "fit":
        return text
    try:
        return str(positive_int(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor fit") from None


def _size(text: str) -> tuple[int, ...]:
    sizes = tuple(map(read_digits, text.lower().split("x")))
    if len(sizes) != 3 or not all(sizes):
        raise ValueError(text)
    return sizes


VERBS = {"mfu": (add_mfu, run_mfu), "gemm": (add_gemm, run_gemm)}
