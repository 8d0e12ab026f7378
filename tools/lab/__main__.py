"""The commands of the lab."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from megascale.cli.parsing import HelpFormatter
from megascale.core.errors import Exit, MegascaleError

COMMANDS = {
    "chaos": "train the quickstart's model while its ranks are slowed, killed, hung and stopped",
    "context-attention": "time attention in every mode of cp over slow links, beside torch's ring (needs root)",
    "device-waits": "find the calls and streams that wait for other streams of a GPU",
    "driver": "measure what the heartbeats of many agents cost the driver",
    "event-store": "measure the event store of 12,288 ranks: its bytes, queries and analyses",
    "fake-rank": "train as one rank of a large job on one GPU, without its peers: time, memory and kernels",
    "faults": "inject faults into jobs of `megascale launch` on this host: culprit, action, seconds, steps lost",
    "hybrid-lengths": "time hybrid data parallelism beside ring and Ulysses on documents of real lengths (needs root)",
    "islands": "time a job on two islands, with pp or dp across the slow link between them (needs root)",
    "kernel-estimates": "estimate a step's kernels beside those measured on a GPU, in docs/results/gpu.md",
    "lives": "kill writers, rename folders and signal ranks at random moments, and check what came of it",
    "message-order": "simulate what the order of a pipeline's receives costs",
    "observe": "slow down synthetic and real jobs, and count how often the findings name kind and culprit",
    "operator-bytes": "count the launches and bytes of a layer's operators in bf16 and every FP8 recipe, without a GPU",
    "optimizer-steps": "time steps of update rules beside AdamW's",
    "overlap": "measure how much communication overlap hides, on a cluster of network namespaces (needs root)",
    "replay": "replay published failures through driver and policy, in simulated time",
    "schedules": "time a step by pipeline schedule, on a cluster of network namespaces (needs root)",
    "spin-gemm": "time GEMMs beside thread blocks that spin, as receives do",
    "startup": "measure what a start consists of: processes, imports, the job's store, and the opening of groups",
    "testbed": "run a command on every host of a temporary cluster of network namespaces (needs root)",
    "vocabulary": "time a step with embedding and head on all pipeline stages, and size every stage's memory",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="tools/lab", description=importlib.import_module("lab").__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_line in COMMANDS.items():
        one = commands.add_parser(name, help=help_line, formatter_class=HelpFormatter)
        if words[:1] == [name]:  # the others are not imported
            module = importlib.import_module(f"lab.commands.{name.replace('-', '_')}")
            one.description = module.__doc__
            module.add_arguments(one)
            one.set_defaults(run=module.run)
    options = parser.parse_args(words)
    try:
        return int(options.run(options))
    except MegascaleError as error:
        print(error, file=sys.stderr)
        return int(error.exit_status)
    except BrokenPipeError:  # the reader of the output has exited
        sys.stderr.close()
        return Exit.UNCLASSIFIED


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # of `lab`, not of its modules
    sys.exit(main())
