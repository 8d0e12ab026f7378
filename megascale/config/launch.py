"""The sections `[launch]` and `[comm]`, timeouts between ranks, and `[nccl]`, thread blocks of communicators and
retries.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megascale.config.section import Section

Seconds = Annotated[float, Field(ge=1, le=10**6)]
"""At least 1 s: ranks that share a core may be slower than a shorter timeout."""


class LaunchConfig(Section):
    """`[launch]`: the start; a rank that waits longer for another rank ends the run."""

    start_timeout_s: Seconds = Field(
        1800.0,
        description="timeout until the end of the first step (rendezvous, indexing of data, loading of a checkpoint, "
        "compilation), and in waits for checkpoints, in seconds; at least comm.timeout_s",
    )


class CommConfig(Section):
    """`[comm]`: communication after the start; a rank that waits longer for another rank ends the run."""

    timeout_s: Seconds = Field(
        600.0,
        description="timeout in training and evaluation from the second step on, in seconds; on GPUs, set several "
        "times the step time, because the host runs ahead",
    )


Ctas = Annotated[list[Annotated[int, Field(ge=1, le=64)]], Field(min_length=2, max_length=2)] | Literal["auto"]
"""Minimum and maximum of thread blocks per operation; NCCL has at most 64 channels of one block."""


IB_TIMEOUT_UNIT_S = 4.096e-6
"""The unit of an InfiniBand adapter's timeout (InfiniBand specification, local ACK timeout)."""


class NcclConfig(Section):
    """`[nccl]`: thread blocks (CTAs) per communicator, each of which takes an SM from GEMMs; retries of adapters."""

    tp_ctas: Ctas = Field("auto", description="tensor parallelism; auto: NCCL's choice")
    cp_ctas: Ctas = Field("auto", description="context parallelism; auto: NCCL's choice")
    ep_ctas: Ctas = Field("auto", description="expert parallelism; auto: NCCL's choice")
    dp_ctas: Ctas = Field(
        [1, 16], description="data parallelism, also of experts, and the gradients of a tied embedding"
    )
    pp_ctas: Ctas = Field(
        [1, 2],
        description="point-to-point messages between pipeline stages; a posted receive occupies its SMs while waiting",
    )
    pp_carveout: Annotated[int, Field(ge=0, le=64)] = Field(
        0,
        description="SMs that GEMMs leave to messages between pipeline stages: a GEMM that finds one occupied may take "
        "twice as long; 0: none",
    )
    world_ctas: Ctas = Field([1, 1], description="all-reduces of a few values over all ranks")

    ib_timeout: Annotated[int, Field(ge=1, le=22)] = Field(
        22,
        description="an InfiniBand or RoCE adapter waits 4.096 us x 2^ib_timeout for an acknowledgement; 22: 17 s",
    )
    ib_retry_count: Annotated[int, Field(ge=0, le=7)] = Field(
        7, description="retries of an adapter before NCCL fails; with the timeout, longer than a link flaps"
    )

    @property
    def ib_patience_s(self) -> float:
        """Seconds without an acknowledgement after which an adapter reports an error."""
        return float((1 + self.ib_retry_count) * IB_TIMEOUT_UNIT_S * 2**self.ib_timeout)

    def ctas(self, axis: str) -> tuple[int, int] | None:
        """Minimum and maximum for an axis (`record.events.Event.axis`); None for NCCL's choice."""
        of_axis = {
            "tp": self.tp_ctas, "cp": self.cp_ctas, "ep": self.ep_ctas, "dp": self.dp_ctas, "edp": self.dp_ctas,
            "tied": self.dp_ctas, "pp": self.pp_ctas,
        }  # fmt: skip
        axis_ctas = of_axis.get(axis, self.world_ctas)
        return (axis_ctas[0], axis_ctas[1]) if isinstance(axis_ctas, list) else None
