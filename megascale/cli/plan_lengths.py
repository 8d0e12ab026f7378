"""`megascale plan lengths`: steps of sequences of unequal lengths, on a static cp mesh, hybrid, and in chunks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from megascale.cli.arguments import add_config_arguments, add_json, positive_int
from megascale.cli.plan_options import add_machine_options, machine_of
from megascale.cli.plan_output import print_tables
from megascale.cli.plan_search import planned_config
from megascale.config.run import RunConfig
from megascale.config.section import AUTO
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.process import without_gc

if TYPE_CHECKING:
    from rich.table import Table

    from megascale.plan.simulate.profiles import Hardware, Stack


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(sub)
    add_machine_options(sub)
    drawn = "lengths to draw: KIND:KEY=VALUE,... such as lognormal:median=2000,sigma=1.8, or a dataset's prefix"
    sub.add_argument("--lengths", metavar="KIND|PREFIX", required=True, help=drawn)
    most = "tokens of a rank in a micro-batch (default: the most that fit in memory)"
    sub.add_argument("--max-tokens-per-rank", type=positive_int, metavar="N", help=most)
    chunk = "also plan chunks of N tokens, which depend on each other in long sequences; auto: the fastest that fit"
    sub.add_argument("--chunk-tokens", type=_tokens_or_auto, metavar="N|auto", default=0, help=chunk)
    keep = "chunks of a sequence that keep their activations (default: 1)"
    sub.add_argument("--keep-chunks", type=positive_int, metavar="K", default=1, help=keep)
    sub.add_argument("--length-steps", type=positive_int, metavar="N", default=4, help="steps to draw (default: 4)")
    add_json(sub)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    hardware, stack = machine_of(options)
    with without_gc():  # a plan allocates many tuples, none in a cycle
        print_tables(report(options, planned_config(options, options.gpus), hardware, stack))
    return Exit.OK


def _tokens_or_auto(text: str) -> int | str:
    return AUTO if text == AUTO else positive_int(text)


def report(options: argparse.Namespace, config: RunConfig, hardware: Hardware, stack: Stack) -> Iterable[str | Table]:
    """Plan a resolved configuration, and return what to print. Raises: ConfigError, DataError"""
    from megascale.data.read.indexed_dataset import open_dataset  # imports numpy, which other plans do without
    from megascale.plan.account.memory import JobMemory
    from megascale.plan.search import length_report
    from megascale.plan.search.length_distribution import KINDS, of_lengths, parse_lengths
    from megascale.plan.search.length_plan import LengthPlan, choose_chunks, fitting_tokens
    from megascale.plan.simulate.sequence_times import SequenceTimes

    if config.parallel.vpp > 1 and (options.chunk_tokens or config.parallel.pp > 1):
        what = f"is {config.parallel.vpp}, and unequal micro-batches are planned with one model chunk per rank"
        raise ConfigError([Problem("command line", "parallel.vpp", what, "plan with parallel.vpp=1")])
    longest = config.model.seq_length
    text = options.lengths
    if (":" in text or text in KINDS) and "://" not in text:
        lengths = parse_lengths(text, longest)
    else:
        lengths = of_lengths(text, open_dataset(text).lengths, longest)
    given = options.max_tokens_per_rank or config.data.max_tokens_per_rank
    limit = hardware.memory_limit(config.world_size)
    most = given or fitting_tokens(JobMemory(config, stack.storage), limit, longest)
    plan = LengthPlan(SequenceTimes(config, hardware, stack, most), lengths, steps=options.length_steps)
    if options.chunk_tokens:
        chosen = options.chunk_tokens, options.keep_chunks
        chunk_tokens, keep = choose_chunks(plan) if options.chunk_tokens == AUTO else chosen
        plan = replace(plan, chunk_tokens=chunk_tokens, keep=keep)
    return [json.dumps(length_report.length_json(plan))] if options.json else length_report.tables(plan)
