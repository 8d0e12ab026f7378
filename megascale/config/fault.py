"""The section `[fault]`: detection of faults, diagnosis, restarts, and faults injected for a test."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from megascale.config.section import Section

Seconds = Annotated[float, Field(ge=0.01, le=10**6)]
Number = Annotated[int, Field(ge=0, le=10**6)]


def _valid_injection(text: str) -> str:
    if text:
        from megascale.config.injection import InjectionError, parse_injection  # for a test alone

        try:
            parse_injection(text)
        except InjectionError as error:
            hint = "such as 'kill rank=2 step=5'; docs/configuration.md lists all kinds"
            context = {"message": str(error), "hint": hint}
            raise PydanticCustomError("injection", "{message}", context) from None
    return text


class FaultConfig(Section):
    """`[fault]`: what `megascale launch` takes for a fault, and what it does about one."""

    # detection
    heartbeat_s: Seconds = Field(1.0, description="seconds between an agent's heartbeats to the driver")
    poll_s: Seconds = Field(0.25, description="seconds between an agent's looks at the flight records of its ranks")
    hang_s: Seconds = Field(
        4.0,
        description="seconds without progress on any rank before a hang's verdict; the next keys set longer bounds",
    )
    hang_step_times: Annotated[float, Field(ge=1, le=10**3)] = Field(
        3.0, description="a hang lasts at least this multiple of the recent step time"
    )
    start_hang_s: Seconds = Field(
        300.0,
        description="bound instead of hang_s from the start of a rank to the end of its first step; in the first step "
        "on nodes that have trained in this launch, ten times the first step then if that is shorter",
    )
    evaluation_hang_s: Seconds = Field(60.0, description="bound instead of hang_s in an evaluation")
    checkpoint_hang_s: Seconds = Field(
        120.0,
        description="bound instead of hang_s while a rank waits for a checkpoint; more than checkpoint.retry_timeout_s",
    )
    link_recovery_s: Seconds = Field(
        5.0, description="a link that is back within this time flapped: nothing is restarted for a network in doubt"
    )
    node_lost_s: Seconds = Field(
        6.0, description="a node without a heartbeat for so long is lost; more than heartbeat_s and link_recovery_s"
    )
    diagnosis_timeout_s: Seconds = Field(
        3.0, description="longest time to collect flight records and stacks before a verdict"
    )
    stacks: bool = Field(True, description="collect the stacks of stuck ranks by py-spy")
    spike_factor: Annotated[float, Field(gt=1, le=10**6)] = Field(
        5.0, description="a loss or gradient norm this many times its recent median raises an alert, not a restart"
    )
    spike_window: Annotated[int, Field(ge=2, le=10**5)] = Field(
        100, description="steps of the recent median; no alert before a fifth of them, and at most one in each window"
    )

    # processes
    agent_grace_s: Seconds = Field(
        300.0, description="an agent that has lost the driver for so long ends its ranks, and itself"
    )
    stop_grace_s: Seconds = Field(
        60.0, description="time to finish a step and save it after a request to stop; then ranks are killed"
    )
    end_grace_s: Seconds = Field(2.0, description="time to end after an order for the ranks of a failed attempt")

    standby: Literal["spares", "nodes", "none"] = Field(
        "spares",
        description="nodes with processes that have imported what ranks need, and wait: spares, or all nodes of the "
        "job, whose hosts then need the memory of these processes (0.25 GB each)",
    )

    # policy
    same_step_failures: Annotated[int, Field(ge=1, le=10**6)] = Field(
        3, description="failures of the same kind without a new step, after which the job stops with status 93"
    )
    oom_failures: Annotated[int, Field(ge=1, le=10**6)] = Field(
        2, description="ends out of memory, in the same step, after which the job stops with status 93"
    )
    restarts_per_hour: Number = Field(
        20, description="restarts within an hour, after which the job stops with status 93"
    )
    restarts_in_place: Number = Field(
        1, description="restarts on the same node within node_window_s before the node is replaced"
    )
    node_window_s: Seconds = Field(3600.0, description="time over which the faults of a node count together")
    network_faults: Annotated[int, Field(ge=1, le=10**6)] = Field(
        2, description="network faults of a node within network_window_s, after which the node is replaced"
    )
    network_window_s: Seconds = Field(300.0, description="time over which network faults of a node count together")
    replace_group: bool = Field(
        True,
        description="a hang without a single culprit replaces the parallel group of the ranks in doubt, if the spares "
        "are enough",
    )
    node_exclusion_s: Seconds = Field(86400.0, description="time for which a replaced node gets no work of this job")
    replacement_wait_s: Seconds = Field(
        600.0, description="wait for a node from the scheduler without a spare; then the job shrinks or stops"
    )
    shrink: bool = Field(
        False, description="without a spare, continue with fewer data-parallel ranks and the same global batch"
    )
    rebuild_stage: Number = Field(
        0,
        description="least number of steps to go back for which a lost pipeline stage is rebuilt instead, inexactly, "
        "[from its neighbours](fault-tolerance.md#rebuild-a-lost-stage); 0: never",
    )

    # diagnosis
    check_nodes: bool = Field(True, description="check a node before it joins, and the nodes of a fault")
    check_timeout_s: Seconds = Field(120.0, description="longest time of the checks of a node")
    check_tolerance: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.3, description="a node this share slower than the median of the nodes fails a check"
    )

    # injection
    inject: Annotated[str, AfterValidator(_valid_injection)] = Field(
        "",
        description="[faults to inject](#injected-faults), for a test; none unless asked for",
    )
