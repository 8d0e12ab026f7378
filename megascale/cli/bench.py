"""`megascale bench`: measured numbers of this machine. Importing it brings no torch; a benchmark does when it runs."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megascale.bench import mfu, overlap
from megascale.catalog.presets import PRESETS
from megascale.cli import bench_ranks
from megascale.cli.numbers import at_least, count, whole
from megascale.config.explain import check_again, load, load_tree
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Exit, MegascaleError, Problem
from megascale.core.process import stopped_in_order
from megascale.launch import environment


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    benchmarks = sub.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    _add_mfu(benchmarks)
    _add_gemm(benchmarks)
    bench_ranks.add_links(benchmarks)
    _add_overlap(benchmarks)
    bench_ranks.add_profile(benchmarks)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    environment.prepare()
    ranks = {"links": bench_ranks.run_links, "profile": bench_ranks.run_profile}
    if options.benchmark in ranks:
        return ranks[options.benchmark](options)
    benchmark = {"mfu": run_mfu, "gemm": run_gemm, "overlap": run_overlap}[options.benchmark]
    with stopped_in_order():
        benchmark(options)
    return Exit.OK


def _add_mfu(benchmarks: Any) -> None:
    help_line = "real training steps on one device: tokens/s, MFU, memory, and what the time goes to"
    about = (mfu.__doc__ or "").partition("\n\n")[2]  # of slices
    one = benchmarks.add_parser("mfu", help=help_line, description=f"{help_line[0].upper()}{help_line[1:]}. {about}")
    which = one.add_mutually_exclusive_group(required=True)
    which.add_argument("--preset", metavar="NAME", help="a model by name, on random tokens in bf16")
    which.add_argument("--config", metavar="FILE", help="a TOML file")
    one.add_argument("overrides", metavar="key=value", nargs="*", help="settings that win, as section.key=value")
    one.add_argument(
        "--layers", type=_layers, metavar="N|fit", help="of the model; fit: as many as the memory holds. Default: fit "
        "for a preset, for a file what it says",
    )  # fmt: skip
    steps, warm, profiled = mfu.LEAST_STEPS, mfu.WARM_UP, mfu.PROFILED
    timed = at_least(steps, f"the median is taken of {steps} or more")
    one.add_argument("--steps", type=timed, default=steps, metavar="N", help=f"timed steps, {steps} or more ({steps})")
    one.add_argument("--warm-up", type=count, default=warm, metavar="N", help=f"steps before them ({warm})")
    one.add_argument("--profile", type=whole, default=profiled, metavar="N", help=f"steps to profile ({profiled})")
    one.add_argument("--json", action="store_true", help="print one JSON object")


def run_mfu(options: argparse.Namespace) -> None:
    """Measure a preset or a file."""
    steps = mfu.Steps(options.warm_up, options.steps, options.profile)
    layers = options.layers or ("fit" if options.preset else None)
    config, whole = _mfu_config(options, steps, layers)
    from megascale.bench.speed import measure

    found = measure(config, whole, steps, overlap.progress, fit=layers == "fit")
    print(json.dumps(found.as_json()) if options.json else mfu.table(found))


def _mfu_config(options: argparse.Namespace, steps: mfu.Steps, layers: str | None) -> tuple[RunConfig, ModelConfig]:
    """What is run, and the whole model.

    Raises: ConfigError with every mistake found
    """

    def read(*others: str) -> RunConfig:
        words = [*options.overrides, *others]
        if options.preset:
            return load_tree(mfu.preset_tree(options.preset), "--preset", [*words, enough])
        return load(options.config, words)

    enough = f"train.steps={steps.total}"
    config = read()
    if config.train.steps < steps.total:
        config = read(enough)
    if config.world != 1:
        found, mend = f"the layout needs {config.world} processes", "one device is measured: tp, pp and dp = 1"
        raise ConfigError([Problem(options.config or "command line", "parallel", found, mend)])
    whole = max(config.model.num_layers, PRESETS.get(config.model.preset or "", {}).get("num_layers", 0))
    wanted = config if layers is None or layers == "fit" else _slice(config, int(layers), whole)
    return wanted, mfu.with_layers(config.model, whole)


def _slice(config: RunConfig, layers: int, whole: int) -> RunConfig:
    """The run with so many of the model's `whole` layers.

    Raises: ConfigError with every rule that it breaks
    """
    if layers > whole:
        found, mend = f"{layers} is more than the model's {whole} layers", f"1 to {whole}, or fit"
        raise ConfigError([Problem("command line", "--layers", found, mend)])
    config = mfu.sized(config, layers)
    check_again(config, f"--layers {layers}")
    return config


def _add_gemm(benchmarks: Any) -> None:
    help_line = "the rate of matrix products that this device attains, by shape and number format"
    one = benchmarks.add_parser("gemm", help=help_line, description=f"{help_line[0].upper()}{help_line[1:]}.")
    one.add_argument(
        "--sizes", nargs="+", type=_size, metavar="MxKxN", help="x [m, k] times a weight [n, k]; default: squares, and "
        "on a GPU the products of llama3-8b and gpt3-175b in micro-batches of 8,192 tokens",
    )  # fmt: skip
    one.add_argument(
        "--dtypes", nargs="+", metavar="NAME", help="of fp64 fp32 tf32 bf16; fp8 (a scale for each row) fp8_tensorwise "
        "(one for all); fp8_fast fp8_tensorwise_fast (fast accumulation)",
    )  # fmt: skip
    one.add_argument("--json", action="store_true", help="print one JSON object")


def run_gemm(options: argparse.Namespace) -> None:
    """Measure every shape in every format."""
    from megascale.bench import gemm
    from megascale.device import detect

    for name in options.dtypes or ():
        if name not in gemm.FORMATS:
            mend = f"of {', '.join(gemm.FORMATS)}"
            raise ConfigError([Problem("command line", "--dtypes", f"there is no format {name!r}", mend)])
    device = detect()
    shapes = [gemm.Shape(*size) for size in options.sizes] if options.sizes else gemm.typical(device)
    found = list(gemm.rates(shapes, options.dtypes or gemm.typical_formats(device), device))
    print(json.dumps(gemm.as_json(found, device)) if options.json else gemm.table(found, device))
    if all(each.rate is None for each in found):
        raise MegascaleError(f"nothing could be measured: {found[0].refusal}", mend="other --sizes or --dtypes")


def _add_overlap(benchmarks: Any) -> None:
    help_line = "what overlap hides of communication, on a cluster of network namespaces (needs root)"
    one = benchmarks.add_parser("overlap", help=help_line, description=overlap.__doc__)
    names = list(overlap.CASES)
    one.add_argument("--axes", nargs="+", choices=names, default=names, metavar="AXIS", help=f"of {', '.join(names)}")
    one.add_argument("--rounds", type=count, default=3, metavar="N", help="runs of each kind, in turns (3)")
    steps = at_least(overlap.WARM_UP + 1, f"the first {overlap.WARM_UP} steps do not count")
    one.add_argument("--steps", type=steps, default=8, metavar="N", help="steps of each run (8)")
    one.add_argument("--output", type=Path, metavar="DIR", help="keep the runs here, for `megascale trace`")
    one.add_argument("--json", action="store_true", help="print one JSON object")


def run_overlap(options: argparse.Namespace) -> None:
    """Measure every axis that is asked for."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.output or Path(temporary)).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise overlap.OverlapError(f"--output {folder}: {error.strerror}", mend="give another folder") from None
        cases = [overlap.CASES[name] for name in dict.fromkeys(options.axes)]
        results = [overlap.measure(case, folder, options.rounds, options.steps, overlap.progress) for case in cases]
    if options.json:
        more = [{"communication": r.communication, "ideal": r.ideal, "hidden": r.hidden} for r in results]
        print(json.dumps({"results": [asdict(r) | extra for r, extra in zip(results, more, strict=True)]}))
    else:
        print(overlap.table(results))


def _layers(text: str) -> str:
    if text == "fit":
        return text
    try:
        return str(count(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor fit") from None


def _size(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no product of matrices: MxKxN, such as 8192x4096x14336")
    return tuple(map(int, parts))
