"""`megascale check`: every mistake of a configuration, and memory per rank, in a fraction of a second without torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from megascale.catalog.schedules import SCHEDULES
from megascale.cli.argument_types import positive_int
from megascale.cli.initial_model import compare_initial_model
from megascale.cli.main import add_config_arguments
from megascale.config.dataset_files import document_range, read_all_dataset_files, split_source
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.config.toml_writer import to_toml
from megascale.core.errors import ConfigError, DataError, Exit, Problem
from megascale.core.units import format_bytes, format_count
from megascale.data.mix.batch_shape import BatchShape
from megascale.data.mix.mixture_spec import mixture_spec
from megascale.data.read.identity import replaced_datasets
from megascale.layout.chunks import stages_of
from megascale.layout.parameters import parameter_count
from megascale.layout.topology import topology_of
from megascale.operate.node.host_limits import datasets_by_split, limit_findings, memory_findings
from megascale.plan.account.activation_offload import host_bytes
from megascale.plan.account.attended import describe_documents
from megascale.plan.account.memory import fullest_rank
from megascale.schedule.check import check_schedule
from megascale.schedule.ir import ScheduleError, build_schedule

RANKS_OF_HOST = 8
"""Most ranks of a host here: a larger job usually has several hosts."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)
    sub.add_argument("--gpus", type=positive_int, metavar="N", help="check for a job of N processes")
    sub.add_argument("--show", action="store_true", help="print the resolved configuration")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    try:
        config = load_config(options.config, options.overrides, world_size=options.gpus)
        check_plug_in_schedule(config)
        changes = compare_initial_model(config)
    except ConfigError as error:
        if not options.json:
            raise
        print(json.dumps({"ok": False, "problems": [vars(problem) for problem in error.problems]}))
        return Exit.CONFIG
    notes = list(host_warnings(config))
    if options.json:
        rank = fullest_rank(config)
        state = {"weights": rank.parameters, "gradients": rank.gradients, "optimizer": rank.optimizer}
        facts = {"ok": True, "processes": config.world_size, "state_bytes": {**state, "total": sum(state.values())}}
        facts |= {"activation_bytes": {"total": rank.activations}, "transient_bytes": rank.transient}
        facts |= {"total_bytes": rank.total, "reader_bytes": reader_bytes(config)}
        facts |= {"host_activation_bytes": offloaded_bytes(config)}
        facts |= {"warnings": notes, "changes": changes}
        print(json.dumps({**facts, "config": config.model_dump(by_alias=True, mode="json")}))
    elif options.show:
        print(to_toml(config), end="")
    else:
        print("\n".join([summary(config), *changes]))
    if not options.json:
        for note in notes:
            print(f"WARNING: {note}", file=sys.stderr)
    return Exit.OK


def check_plug_in_schedule(config: RunConfig) -> None:
    """Check the schedule of another package at this run's size. Tests prove the others.

    Raises: ConfigError
    """
    p = config.parallel
    assert p.schedule is not None, "a resolved configuration names its schedule"
    if (card := SCHEDULES[p.schedule]).target.startswith("megascale."):
        return
    m = config.num_microbatches
    try:
        check_schedule(build_schedule(card.load(), p.pp, p.vpp, m), stages_of(config).placement, m)
    except ScheduleError as error:
        raise ConfigError([Problem(card.target, "parallel.schedule", str(error))]) from error


def data_summary(config: RunConfig) -> str:
    """Describe the training data, with the largest number of epochs over a dataset; empty for mock data."""
    source, fractions = split_source(config.data, "train")
    if config.data.mock or source is None:
        return ""
    blend = [(1.0, source)] if isinstance(source, str) else source
    total, epochs, buckets = 0, 0.0, _samples_of_pieces(config)
    found = read_all_dataset_files([prefix for _, prefix in blend])
    for number, (weight, prefix) in enumerate(blend):
        files = found[prefix]
        if isinstance(files, DataError):
            raise files
        tokens = files.tokens_in(*document_range(files.documents, fractions))
        samples = config.samples * weight / sum(weight for weight, _ in blend)
        epoch = buckets[number] if buckets else (tokens - 1) // config.model.seq_length
        total, epochs = total + tokens, max(epochs, samples / epoch)
    count = f"{len(blend)} datasets" if len(blend) > 1 else "a dataset"
    most = " at most" if len(blend) > 1 else ""
    lines = [f"trains on {format_count(total)} tokens of {count}, {epochs:.3g} epochs{most}{packing_loss(config)}\n"]
    if config.data.packing == "decompose":
        from megascale.data.mix.bucket_summary import describe_buckets  # imports numpy

        lines.append(f"{describe_buckets(mixture_spec(config, 'train'))}\n")
    return "".join(lines)


def _samples_of_pieces(config: RunConfig) -> list[int]:
    """The samples of an epoch of each dataset, if documents are decomposed, which leaves tokens out; else empty."""
    if config.data.packing != "decompose":
        return []
    from megascale.data.mix.mixture import Mixture  # imports numpy

    return [sum(samples) for samples in Mixture(mixture_spec(config, "train")).bucket_samples()]


def packing_loss(config: RunConfig) -> str:
    """Tell the share of padding in the training data and the tokens that best fit leaves out, from the lengths of the
    documents; empty with another packing.
    """
    if config.data.packing != "best_fit":
        return ""
    from megascale.data.mix.mixture import Mixture  # imports numpy

    mixture = Mixture(mixture_spec(config, "train"))
    padding, left_out = mixture.padding(), mixture.left_out()
    text = f"; {padding:.2%} of the tokens are padding" if padding else ""
    return text + (f"; {left_out} rests of one token, which have no label, are left out" if left_out else "")


def reader_bytes(config: RunConfig) -> int:
    """Host memory of the reader of the job's first host, on which are up to RANKS_OF_HOST ranks; 0 without one."""
    if config.data.reader != "host":
        return 0
    from megascale.data.host_reader.reader_memory import reader_shape  # imports numpy

    ranks = range(min(config.world_size, RANKS_OF_HOST))
    shape, splits = BatchShape(config.batch.total, config.batch.micro, config.dp), 2 if config.train.eval_every else 1
    return reader_shape(mixture_spec(config, "train"), shape, topology_of(config), ranks, splits).bytes


def offloaded_bytes(config: RunConfig) -> int:
    """Host memory of the rank with most block inputs there; 0 without `train.activation_offload`."""
    stages = range(config.parallel.pp if config.train.activation_offload else 0)
    return max((host_bytes(config, stage) for stage in stages), default=0)


def host_warnings(config: RunConfig) -> Iterator[str]:
    """Describe limits of this host that a run would exceed here, and datasets that were replaced since the run's last
    start. The hosts of the run may have other limits.
    """
    ranks = min(config.world_size, RANKS_OF_HOST)
    datasets, saves = datasets_by_split(config.data, config.train.eval_every), bool(config.checkpoint.every)
    findings = list(limit_findings(datasets, config.world_size, ranks, saves=saves))
    if config.checkpoint.memory_every:
        findings += memory_findings(config.checkpoint, ranks, fullest_rank(config).optimizer)
    for finding in findings:
        yield f"this host  {finding.key}: {finding.message}  -> {finding.hint}"
    if config.checkpoint.resume != "never":
        yield from replaced_datasets(config.data, config.folder)


def summary(config: RunConfig) -> str:
    """Describe the run in one line, and list the peak memory of the rank with the highest peak, by kind."""
    p, m = config.parallel, config.model
    cp = f" x cp {p.cp} {p.cp_mode}" if p.cp > 1 else ""
    layout = (
        f"tp {p.tp}{' sp' if p.sp else ''}{cp} x pp {p.pp}{f' (vpp {p.vpp})' if p.vpp > 1 else ''} x dp {config.dp}"
    )
    tokens, whole = config.batch.total * m.seq_length, config.samples * m.seq_length
    rank = fullest_rank(config)
    kinds = {**vars(rank), "total": rank.total}
    rampup = " after the ramp-up" if config.batch.rampup else ""
    reader = f"\nmemory of a host's reader {format_bytes(size)}" if (size := reader_bytes(config)) else ""
    inputs = (
        f"\nblock inputs of a rank in host memory {format_bytes(size)}" if (size := offloaded_bytes(config)) else ""
    )
    documents = f"{text}\n" if (text := describe_documents(config.data)) else ""
    memory = "\n".join(f"  {kind:<12}{format_bytes(size):>10}" for kind, size in kinds.items())
    return (
        f"{config.name}: {format_count(parameter_count(m))} parameters, {layout} = {config.world_size} processes, "
        f"{config.num_microbatches} micro-batches of {config.batch.micro}, "
        f"{format_count(tokens)} tokens per step{rampup}, "
        f"{format_count(whole)} in {config.train.steps} steps: no mistakes found\n"
        f"{data_summary(config)}{documents}memory of the fullest rank\n{memory}{inputs}{reader}"
    )
