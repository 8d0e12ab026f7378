"""The tables of a run's event store, and their columns.

A table is a set of Parquet files in RUN/events, one for each node and interval. Times are ns since 1970 on rank 0's
clock, durations ns, sizes bytes. Text columns are dictionary-encoded.

- `TABLES`: all tables by name, each a tuple of `Column`
- `record.layout.TAGS`: what a step may contain besides training, in the column `tags` of `steps`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megascale.record.layout import COORDINATES, EVENT_FIELDS, STEP_FIELDS, Fields

ColumnType = Literal["int8", "int16", "int32", "int64", "float64", "text"]

STEP_AXIS = "step"  # the axis of a whole step: the row of `step_parts` with its duration

COLD_TAGS = ("first step", "restart", "profile")  # tags of steps that are never ordinary

COMMON = 0.2
"""Share of the steps from which on a tag is common, such as that of a save in every step: it tells no class of steps,
and a slower step may lack it, which is measured by shares of the step.
"""


def has_rare_tag(steps: str = "steps", common: float = COMMON) -> str:
    """Return the condition that a row of `steps` is of no ordinary step: with a cold tag, or one that is not common."""
    return f"""list_has_any(string_split(tags, ','), (
        SELECT coalesce(list(tag), []) FROM (
            SELECT tag, count(*) AS rows FROM (SELECT unnest(string_split(tags, ',')) AS tag FROM {steps}) GROUP BY tag
        ) WHERE tag <> '' AND (tag IN {COLD_TAGS} OR rows < {common} * (SELECT count(*) FROM {steps}))
    ))"""


@dataclass(frozen=True)
class Column:
    """A column: name, type, and meaning with unit."""

    name: str
    type: ColumnType
    meaning: str


_TYPES: dict[str, ColumnType] = {"i2": "int16", "i4": "int32", "i8": "int64", "f8": "float64", "u2": "text"}


def _recorded(fields: Fields, **meanings: str) -> tuple[Column, ...]:
    """Return columns of what a rank's log has, with its types: times there in seconds are ns here."""
    kinds = dict(fields)
    return tuple(
        Column(name, _TYPES[kinds[name]] if name in kinds else "int64", meaning) for name, meaning in meanings.items()
    )


_WHO = (Column("attempt", "int16", "attempt of the job, from 0"), Column("rank", "int32", "global rank"))

_PART = _recorded(
    EVENT_FIELDS,
    step="step, from 1; 0 outside of steps",
    axis="compute, an axis of parallelism (tp, cp, dp, pp, tied, world), host, or step",
    name="action (F, B, update, ...), collective, send, receive, or activity of the host",
)

TABLES: dict[str, tuple[Column, ...]] = {
    "events": (
        *_WHO,
        *_PART,
        *_recorded(
            EVENT_FIELDS,
            part="tensor or operation that the communication carries, such as qkv",
            layer="transformer layer; -1: none",
            stage="virtual pipeline stage that receives a message; -1: none",
            direction="forward, backward, or empty",
            chunk="model chunk of the rank; -1: none",
            microbatch="micro-batch; -1: none",
            group_name="communicator; empty for compute",
            sequence="number of the communication in its group; -1 for compute",
            peer="global rank at the other end of a message; -1: none",
            bytes="bytes of the full tensor",
            issue_ns="when the host issued it",
            start_ns="when it started",
            end_ns="when it ended",
            exposed_ns="wait of compute for the communication; of an action: the waits inside it",
        ),
    ),
    "step_parts": (
        *_WHO,
        *_PART,
        Column("chunk", "int16", "model chunk of the rank; -1: none"),
        Column("group_name", "text", "communicator; empty for compute"),
        Column("count", "int32", "events; an action in segments counts once"),
        Column("total_ns", "int64", "sum of their durations"),
        Column("max_ns", "int64", "longest duration"),
        Column("exposed_ns", "int64", "sum of their exposed times; of an action: the waits inside it"),
        Column("bytes", "int64", "sum of their bytes"),
        Column("last_issue_ns", "int64", "when the last of them was issued"),
    ),
    "steps": (
        *_WHO,
        *_recorded(
            STEP_FIELDS,
            step="step, from 1",
            start_ns="when the step's batch was asked for",
            end_ns="when the step ended, evaluations and saves after it included",
            train_ns="time of the step without evaluations and saves",
        ),
        Column("tags", "text", "tags joined by commas; empty for an ordinary step"),
        *_recorded(
            STEP_FIELDS,
            loss="mean loss of the step",
            grad_norm="norm of the gradients before clipping",
            tokens="tokens that all ranks processed in the step",
            flops="model FLOPs of the step, over all ranks, full-attention convention",
            peak_memory_bytes="peak memory of the rank's device so far",
        ),
        Column("events_lost", "int64", "events of the step that were overwritten before they were read"),
    ),
    "ranks": (
        *_WHO,
        Column("world", "int32", "ranks of the attempt"),
        Column("node", "text", "node, as the scheduler or the launcher names it"),
        Column("host", "text", "host name"),
        Column("pid", "int32", "process"),
        *(Column(axis, "int32", f"index on the {axis} axis") for axis in COORDINATES),
        Column("peak_flops", "float64", "peak FLOP/s of the rank's device; 0: unknown"),
        Column("cores", "int32", "cores that the ranks of the node may use together; 0: unknown"),
        Column("start_ns", "int64", "start of the process"),
    ),
    "expert_loads": (
        _WHO[0],
        Column("step", "int32", "step, from 1"),
        Column("layer", "int16", "transformer layer, from 0"),
        Column("expert", "int16", "expert of the layer, from 0"),
        Column("load", "float64", "tokens of the expert, relative to the mean of the layer's experts"),
    ),
    "host_metrics": (
        Column("node", "text", "node"),
        Column("time_ns", "int64", "time of the sample"),
        Column("metric", "text", "name, such as cpu_share"),
        Column("value", "float64", "value, in the unit that the name ends with"),
    ),
    "states": (
        *_WHO,
        Column("time_ns", "int64", "when the record was read"),
        Column("record", "text", "the rank's flight record, as JSON (record.rank_state.RankState.to_dict)"),
    ),
}
"""Columns by table."""

TABLE_ROWS = {
    "events": "an action, communication or activity of the host, as it was recorded",
    "step_parts": "a rank's events of one step and kind, summed; a late event makes a second row",
    "steps": "a step of a rank",
    "ranks": "a rank in an attempt",
    "expert_loads": "an expert in a logged step: in the newest one, twice a second",
    "host_metrics": "a metric of a node in a sample, by its agent",
    "states": "what a rank did when its node last looked",
}
"""Meaning of a row, by table."""


def schema_page() -> str:
    """Return the tables and their columns in Markdown."""
    lines = []
    for table, columns in TABLES.items():
        lines += [f"**{table}**: a row is {TABLE_ROWS[table]}.", "", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{column.name}` | {column.type} | {column.meaning} |" for column in columns] + [""]
    return "\n".join(lines).rstrip()
