"""Attention of ranks that share a sequence, forward and backward: every way of exchange, beside torch's own ring, on
hosts of a testbed (network namespaces) with links of a given rate; needs root.

The ways alternate in one job. A time is the median over rounds of the slowest rank's, so that a rank's wait for its
neighbours counts. torch's dispatcher has no entry for its CPU kernel; its ring takes any, and is called with it.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

from lab import LAB
from lab.hosts import run_torchrun
from lab.testbed import HostLink, Testbed
from megascale.comm import init
from megascale.comm.group import Group, single_rank_group
from megascale.comm.open_group import open_group
from megascale.comm.work import COMPLETED, TransportWork
from megascale.core.rank import Rank, rank_from_environment
from megascale.device import detect_device
from megascale.layout.sequence_shard import SequenceShard, shard_sequence
from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret
from megascale.ops.core_attention import AttentionMask, torch_attend
from megascale.ops.partial_attention import TorchPartialAttention
from megascale.parallel.context_parallel import ContextParallel
from megascale.record.recorder import Recorder


class SilentTransport:
    """A transport whose messages arrive at once, with whatever was there."""

    def send_on(self, out: Tensor, into: Tensor, to: int, source: int) -> TransportWork:
        return COMPLETED


WAYS = ("ring", "ring, no overlap", "allgather", "ulysses", "torch's ring")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--hosts", type=int, default=2, help="ranks, each on a host of its own; default %(default)s")
    parser.add_argument("--rate", type=float, default=250, metavar="MBIT", help="Mbit/s of a link; default %(default)s")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], metavar="TOKENS")
    parser.add_argument("--heads", type=int, default=8, help="query heads of 64; default %(default)s")
    parser.add_argument("--kv-heads", type=int, default=8, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Measure on the hosts; return 1 if the job failed."""
    if options.rank:
        rank_main(options)
        return 0
    given = [f"--heads={options.heads}", f"--kv-heads={options.kv_heads}", f"--rounds={options.rounds}"]
    command = [LAB, "context-attention", "--rank", *given, "--lengths", *map(str, options.lengths)]
    cores = None if options.hosts <= 2 else 2 / options.hosts
    with Testbed(options.hosts, HostLink(options.rate * 1e6), cores) as testbed:
        ends = run_torchrun(testbed, 1, command, {SECRET_VARIABLE: new_secret()}, timeout=3600)
    if any(end.status for end in ends):
        print(next(end.stderr for end in ends if end.status)[-3000:], file=sys.stderr)
        return 1
    print("\n".join(table(options, json.loads(ends[0].stdout.splitlines()[-1]))))
    return 0


def table(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> list[str]:
    """Format milliseconds by length and way."""
    what = f"{options.hosts} ranks, {options.rate:g} Mbit/s, {options.heads} heads of 64, {options.kv_heads} of keys"
    lines = [f"{what} and values, fp32; milliseconds of a layer's attention, forward and backward", ""]
    lines += [f"| tokens | {' | '.join(WAYS)} | compute |", "| ---: |" + " ---: |" * (len(WAYS) + 1)]
    for length, times in found.items():
        cells = [f"{times[way] * 1e3:,.0f}" for way in (*WAYS, "compute")]
        lines.append(f"| {int(length):,} | {' | '.join(cells)} |")
    return lines


def rank_main(options: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 prints the medians as a line of JSON."""
    rank = rank_from_environment() or Rank(0, 1, 0, "localhost")
    init.init_distributed(rank, detect_device(rank.local_rank, allow_gpu=False))
    torch.set_num_threads(1)
    group = open_group("cp.keys", range(rank.world_size), rank.rank, Recorder(), messages=True)
    found = {str(length): measure(options, rank, group, length) for length in options.lengths}
    if rank.rank == 0:
        print(json.dumps(found), flush=True)
    init.shutdown_distributed()


def measure(options: argparse.Namespace, rank: Rank, group: Group, length: int) -> dict[str, float]:
    """Return the seconds of every way, and of a ring whose messages take no time."""
    ways = ways_of(options, rank, group, length)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):  # the first warms up
        for name, run in ways.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:
                times[name].append(float(slowest))
    return {name: statistics.median(values) for name, values in times.items()}


def ways_of(options: argparse.Namespace, rank: Rank, group: Group, length: int) -> dict[str, Callable[[], None]]:
    """Return one pass, forward and backward, of every way."""
    ranks, alone = rank.world_size, single_rank_group("cp.heads", rank.rank)
    generator = torch.Generator().manual_seed(rank.rank)
    tokens = length // ranks
    shapes = [(tokens, 1, heads, 64) for heads in (options.heads, options.kv_heads, options.kv_heads, options.heads)]
    q, k, v, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    attend, partial, silent = torch_attend(), TorchPartialAttention(), copy.copy(group)
    silent.p2p_transport = SilentTransport()  # type: ignore[assignment]
    by_keys, by_heads = (
        shard_sequence(length, keys, heads, rank.rank) for keys, heads in ((ranks, 1), (1, ranks))
    )  # fmt: skip

    def ours(context: ContextParallel, shard: SequenceShard) -> Callable[[], None]:
        def run() -> None:
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = context.attention(leaves[0], leaves[1], leaves[2], AttentionMask(), shard, 0)
            torch.autograd.grad(out, leaves, grad)

        return run

    return {
        "ring": ours(ContextParallel(alone, group, attend, partial), by_keys),
        "ring, no overlap": ours(ContextParallel(alone, group, attend, partial, overlap=False), by_keys),
        "allgather": ours(ContextParallel(alone, group, attend, partial, gathers=True), by_keys),
        "ulysses": ours(ContextParallel(group, single_rank_group("cp.keys"), attend, None), by_heads),
        "torch's ring": torchs_ring(q, k, v, grad),
        "compute": ours(ContextParallel(alone, silent, attend, partial), by_keys),
    }


def torchs_ring(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Callable[[], None]:
    """Return a pass of torch's ring attention with torch's kernel for CPUs."""
    aten, group = torch.ops.aten, dist.group.WORLD
    assert group is not None
    repeats = q.shape[2] // k.shape[2]  # its kernel for CPUs has no grouped queries
    query, key, value, out_grad = (t.permute(1, 2, 0, 3).contiguous() for t in (q, k, v, grad))
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))

    def forward(query: Any, key: Any, value: Any, **given: Any) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, given["is_causal"])

    def backward(query: Any, key: Any, value: Any, **given: Any) -> Any:
        given |= {"query": query, "key": key, "value": value}
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        operands = (given[name] for name in names)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*operands, 0.0, given["is_causal"])

    def run() -> None:
        out, lse = theirs._templated_ring_attention(group, 2, forward, query, key, value, True)
        theirs._templated_ring_attention_backward(
            group, 2, backward, out_grad, "grad_out", query, key, value, out, lse.contiguous(), True
        )

    return run
