"""The processes of a node's checks: a check that hangs, crashes or imports torch leaves the caller as it was.

    caller: agent or doctor  --  stdin: names, arguments, caller as JSON  -->   check_process, one per rank or device
                             <-- stdout: a CheckResult a line             --

Processes inherit the job's secret with the environment, and end with the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from megascale.catalog.checks import CHECK_SETS, CHECKS
from megascale.core.network import LOOPBACK, listen
from megascale.core.process import module_command
from megascale.core.rank import STORE_VARIABLE
from megascale.core.registry import Card
from megascale.operate.channel.secret import DESCRIPTOR_VARIABLE, SECRET_VARIABLE, new_secret
from megascale.operate.health.checks.endpoint import check_secret, try_request
from megascale.operate.health.checks.result import CheckError, CheckResult

OPEN_ENDPOINT, CLOSE_ENDPOINT = "open_endpoint", "close_endpoint"
"""Requests that start and end the node's server for other nodes' checks (`checks.endpoint`)."""

RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", STORE_VARIABLE,
)  # fmt: skip

LAST_LINES = 3  # lines of a failed process's stderr that its result repeats

END_S = 2.0
"""Seconds in which a killed process must end; a process that waits for a dead disk does not, and is left behind."""


def checks_named(name: str) -> list[Card]:
    """Return the checks of a set, or a single check. Raises: CheckError for an unknown name"""
    names = CHECK_SETS.get(name, (name,))
    if names[0] not in CHECKS.cards:
        nearest = CHECKS.nearest(name, also=CHECK_SETS)
        hint = f"did you mean {nearest}?" if nearest else f"one of {', '.join([*CHECK_SETS, *CHECKS.names()])}"
        raise CheckError(f"there is no check {name!r}", hint=hint)
    return [CHECKS[one] for one in names]


async def run_check(name: str, arguments: Mapping[str, Any], timeout_s: float) -> CheckResult:
    """Run a check or a set of checks on this node; the result of a set has the checks' results as parts.

    The result of OPEN_ENDPOINT has its address among the details, and CLOSE_ENDPOINT takes the address.

    Arguments of all checks: `slots`, the number of devices or ranks of the node (default: 1), `env`, variables of the
    processes. Further arguments belong to the checks. A failure, and a check that takes longer than `timeout_s`, is a
    result with a `problem`.

    Raises: CheckError for an unknown check
    """
    if name == OPEN_ENDPOINT:
        return await _open_endpoint(arguments, timeout_s)
    if name == CLOSE_ENDPOINT:
        asked = arguments["address"], check_secret(arguments), "end", timeout_s
        return CheckResult(name, problem=await asyncio.to_thread(try_request, *asked))
    start, cards = time.monotonic(), checks_named(name)
    results: list[CheckResult] = []
    for runs_on, some in groupby(cards, lambda card: str(card.facts["runs_on"])):
        names = [card.name for card in some]
        rest_s = timeout_s - (time.monotonic() - start)
        batches = [names] if runs_on != "group" else [[one] for one in names]  # a job of its own for every check
        for batch in batches:
            results += await _run_batch(batch, runs_on, arguments, max(0.1, rest_s))
    if [card.name for card in cards] == [name]:
        return results[0]
    problems = [f"{result.name}: {result.problem}" for result in results if result.problem]
    seconds = time.monotonic() - start
    return CheckResult(name, duration_s=seconds, problem="; ".join(problems), parts=tuple(results))


async def _run_batch(
    names: Sequence[str], runs_on: str, arguments: Mapping[str, Any], timeout_s: float
) -> list[CheckResult]:
    """Run checks in as many processes as they need; return one result for each check."""
    slots = int(arguments.get("slots", 1)) if runs_on != "host" else 1
    world = int(arguments["group"]["world"]) if arguments.get("group") else slots
    if any(card.facts["min_ranks"] > world for name in names for card in checks_named(name)):
        return [CheckResult(name, skipped=f"{world} rank{'s' if world > 1 else ''}") for name in names]
    with _rank_environments(runs_on, arguments, slots) as (environments, descriptors):
        answers = await asyncio.gather(
            *(_run_process(names, arguments, env, descriptors, timeout_s) for env in environments)
        )
    return [_combined(results) for results in zip(*answers, strict=True)]


@contextlib.contextmanager
def _rank_environments(
    runs_on: str, arguments: Mapping[str, Any], slots: int
) -> Iterator[tuple[list[dict[str, str]], list[int]]]:
    """Yield the environment of every process, and the descriptors that they inherit."""
    env = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES} | arguments.get("env", {})
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    descriptors = secret_descriptors(env)
    if runs_on != "group":
        local = {"LOCAL_WORLD_SIZE": str(slots)}
        yield [env | local | {"LOCAL_RANK": str(slot)} for slot in range(slots)], descriptors
        return
    group = arguments.get("group") or {"world": slots, "ranks": range(slots)}
    local = {"LOCAL_WORLD_SIZE": str(len(group["ranks"])), "WORLD_SIZE": str(group["world"])}
    places = [local | {"LOCAL_RANK": str(index), "RANK": str(rank)} for index, rank in enumerate(group["ranks"])]
    if arguments.get("group"):
        yield [env | place for place in places], descriptors
        return
    if DESCRIPTOR_VARIABLE not in env:
        env.setdefault(SECRET_VARIABLE, new_secret())
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with listen(LOOPBACK) as listener:
        store = ":".join(map(str, listener.getsockname()))
        stores = [f"{store}:{listener.fileno()}", *[store] * (slots - 1)]  # rank 0 serves it
        environments = [env | place | {STORE_VARIABLE: at} for place, at in zip(places, stores, strict=True)]
        yield environments, [*descriptors, listener.fileno()]


async def _run_process(
    names: Sequence[str],
    arguments: Mapping[str, Any],
    env: Mapping[str, str],
    descriptors: Sequence[int],
    timeout_s: float,
) -> list[CheckResult]:
    """Run checks in one process; a check without a result gets one that says why."""
    start, lines = time.monotonic(), list[bytes]()
    process = await _start_process(names, arguments, env, descriptors)
    stdout, stderr = process.stdout, process.stderr
    assert stdout is not None and stderr is not None, "the process was started with pipes"

    async def read_lines() -> None:
        async for line in stdout:
            lines.append(line)

    try:
        async with asyncio.timeout(timeout_s):
            _, err, _ = await asyncio.gather(read_lines(), stderr.read(), process.wait())
        problem = _end_of(process.returncode or 0, err)
    except TimeoutError:
        await _kill(process)
        problem = f"no result within {timeout_s:.0f} s"
    except asyncio.CancelledError:
        await _kill(process)
        raise
    seconds = time.monotonic() - start
    missing = [CheckResult(name, duration_s=seconds, problem=problem) for name in names[len(lines) :]]
    return [*(CheckResult.from_dict(json.loads(line)) for line in lines), *missing]


async def _open_endpoint(arguments: Mapping[str, Any], timeout_s: float) -> CheckResult:
    """Start this node's endpoint, for at most `seconds` (default: ENDPOINT_S). The detail `address` is host:port.

    `host`: the name by which other nodes reach this node (default: this host's name).
    """
    start, env = time.monotonic(), dict(os.environ) | arguments.get("env", {})
    process = await _start_process((OPEN_ENDPOINT,), arguments, env, secret_descriptors(env))
    assert process.stdout is not None and process.stderr is not None, "the process was started with pipes"
    try:
        async with asyncio.timeout(timeout_s):
            line = await process.stdout.readline()
            problem = "" if line else _end_of(await process.wait(), await process.stderr.read())
    except TimeoutError:
        await _kill(process)
        line, problem = b"", f"no endpoint within {timeout_s:.0f} s"
    details = json.loads(line) if line else {}
    return CheckResult(OPEN_ENDPOINT, duration_s=time.monotonic() - start, problem=problem, details=details)


def secret_descriptors(env: Mapping[str, str]) -> list[int]:
    """Return the descriptors that a process inherits with the job's secret."""
    return [int(env[DESCRIPTOR_VARIABLE])] if DESCRIPTOR_VARIABLE in env else []


async def _start_process(
    names: Sequence[str], arguments: Mapping[str, Any], env: Mapping[str, str], descriptors: Sequence[int]
) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *module_command("megascale.operate.health.checks.check_process"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=dict(env), pass_fds=descriptors, start_new_session=True, limit=1 << 24,
    )  # fmt: skip
    assert process.stdin is not None, "the process was started with pipes"
    process.stdin.write(json.dumps([list(names), dict(arguments), os.getpid()]).encode())
    process.stdin.close()
    return process


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()


def _end_of(status: int, err: bytes) -> str:
    lines = [line.strip() for line in err.decode(errors="replace").splitlines() if line.strip()][-LAST_LINES:]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return ": ".join([f"its process {how} without a result", *lines])


def _combined(results: Sequence[CheckResult]) -> CheckResult:
    """Combine the results of the same check in the processes of a node: the worst value, and all digests."""
    if len(results) == 1:
        return results[0]
    values = [result.value for result in results if result.value is not None]
    problems = [f"device {slot}: {result.problem}" for slot, result in enumerate(results) if result.problem]
    card = checks_named(results[0].name)[0]
    worst = (max if card.facts["better"] == "zero" else min)(values, default=None)
    return replace(
        results[0],
        value=worst,
        duration_s=max(result.duration_s for result in results),
        problem="; ".join(problems),
        digest=" ".join(result.digest for result in results).strip(),
        details={"devices": [{"value": result.value, **result.details} for result in results]},
    )
