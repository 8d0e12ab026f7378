"""Answers of an agent to the driver's questions about its node: flight records, stacks, results of checks."""

from __future__ import annotations

import asyncio
import contextlib

from megascale.core.errors import MegascaleError
from megascale.core.process import process_facts
from megascale.operate.channel.messages import Check, CheckDone, Collect, Records, Stacks
from megascale.operate.health.checks.runner import run_check
from megascale.operate.node.ranks import Ranks
from megascale.operate.node.stacks import STACK_S, stack_of
from megascale.operate.node.threads import call_in_thread
from megascale.record.log_files import process_states

STACKS_AT_ONCE = 2  # stacks that are taken at the same time: each takes a core for a moment


async def read_records(ranks: Ranks, order: Collect) -> Records:
    """Return the flight records of ranks, and the states of their processes."""
    records = ranks.records(order.ranks)
    pids = ranks.processes(order.ranks)
    states = {rank: process_facts(pid)[0] for rank, pid in pids.items() if rank not in records}
    with contextlib.suppress(RuntimeError):  # no thread for it
        running = {rank: records[rank] for rank in pids if rank in records}
        states |= await call_in_thread(lambda: process_states(running), None)
    return Records(order.attempt, {rank: record.to_dict(order.events) for rank, record in records.items()}, states)


async def take_stacks(ranks: Ranks, order: Collect) -> Stacks:
    """Return the stacks of running ranks, or why there are none."""
    turns, pids = asyncio.Semaphore(STACKS_AT_ONCE), ranks.processes(order.ranks)

    async def take(pid: int) -> str:
        async with turns:
            try:
                return await call_in_thread(lambda: stack_of(pid), 2 * STACK_S)
            except (TimeoutError, RuntimeError) as error:
                return f"no stack of process {pid}: {str(error) or 'py-spy does not answer'}"

    return Stacks(order.attempt, dict(zip(pids, await asyncio.gather(*map(take, pids.values())), strict=True)))


async def check_node(order: Check, slots: int) -> CheckDone:
    """Run a check of this node. `slots`: ranks that the node can run."""
    try:
        result = await run_check(order.name, {"slots": slots, **order.arguments}, order.timeout_s)
    except (MegascaleError, OSError, RuntimeError) as error:
        return CheckDone(order.id, order.name, {}, str(error))
    return CheckDone(order.id, order.name, result.to_dict())
