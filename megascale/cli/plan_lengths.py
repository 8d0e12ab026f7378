"""`megascale plan --lengths`: steps of sequences of unequal lengths, on a static cp mesh, hybrid, and in chunks.

Imports numpy, which other plans do without.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace

from rich.table import Table

from megascale.config.run import RunConfig
from megascale.config.section import AUTO
from megascale.core.errors import ConfigError, Problem
from megascale.data.read.indexed_dataset import open_dataset
from megascale.layout.length_distribution import KINDS, LengthDistribution, of_lengths, parse_lengths
from megascale.plan.search import length_report
from megascale.plan.search.length_plan import LengthPlan, choose_chunks, fitting_tokens
from megascale.plan.simulate.profiles import Hardware, Stack


def report(options: argparse.Namespace, config: RunConfig, hardware: Hardware, stack: Stack) -> Iterable[str | Table]:
    """Plan a resolved configuration, and return what to print.

    Raises: ConfigError, DataError
    """
    if config.parallel.vpp > 1 and (options.chunk_tokens or config.parallel.pp > 1):
        what = f"is {config.parallel.vpp}, and unequal micro-batches are planned with one model chunk per rank"
        raise ConfigError([Problem("command line", "parallel.vpp", what, "plan with parallel.vpp=1")])
    longest = config.model.seq_length
    lengths = read_lengths(options.lengths, longest)
    given = options.max_tokens_per_rank or config.data.max_tokens_per_rank
    most = given or fitting_tokens(config, hardware, stack, longest)
    plan = LengthPlan(config, hardware, stack, lengths, most, steps=options.length_steps)
    if options.chunk_tokens:
        chosen = options.chunk_tokens, options.keep_chunks
        chunk_tokens, keep = choose_chunks(plan) if options.chunk_tokens == AUTO else chosen
        plan = replace(plan, chunk_tokens=chunk_tokens, keep=keep)
    if options.json:
        return [json.dumps(length_report.length_json(plan))]
    return length_report.tables(plan)


def read_lengths(text: str, longest: int) -> LengthDistribution:
    """Read a distribution, or the document lengths of a dataset's index.

    Raises: ConfigError, DataError
    """
    if (":" in text or text in KINDS) and "://" not in text:
        return parse_lengths(text, longest)
    return of_lengths(text, open_dataset(text).lengths, longest)
