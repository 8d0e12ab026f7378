"""Ready queries of the event store, by name: each is one SELECT, and an example for others.

Queries about speed leave out steps with a rare tag on any rank, which a known cause has made longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.operate.store.schema import has_rare_tag

_ORDINARY = f"(attempt, step) NOT IN (SELECT (attempt, step) FROM steps WHERE {has_rare_tag()}) AND step > 0"


@dataclass(frozen=True)
class ReadyQuery:
    """A query, and what it shows."""

    help: str
    sql: str


READY_QUERIES = {
    "slowest-ranks": ReadyQuery(
        "ranks by the time of their own compute in a step, beside the median of the ranks of their pipeline stage",
        f"""
        WITH own AS (
            SELECT attempt, rank, step, sum(total_ns - exposed_ns) / 1e6 AS ms
            FROM step_parts WHERE axis = 'compute' AND {_ORDINARY} GROUP BY ALL
        ), by_rank AS (SELECT attempt, rank, median(ms) AS ms, count(*) AS steps FROM own GROUP BY ALL)
        SELECT attempt, rank, node, pp AS stage, steps, round(ms, 3) AS own_ms,
            round(ms / median(ms) OVER (PARTITION BY attempt, pp), 3) AS of_median
        FROM by_rank JOIN ranks USING (attempt, rank) ORDER BY of_median DESC, attempt, rank LIMIT 20""",
    ),
    "exposed": ReadyQuery(
        "communication by axis and operation, as means of a rank and step: time in flight, exposed time and its share",
        f"""
        WITH counted AS (SELECT count(*) AS n, sum(train_ns) AS train FROM steps WHERE {_ORDINARY})
        SELECT axis, name, round(sum(count) / any_value(n), 1) AS calls, round(sum(bytes) / any_value(n)) AS bytes,
            round(sum(total_ns) / any_value(n) / 1e6, 3) AS ms,
            round(sum(exposed_ns) / any_value(n) / 1e6, 3) AS exposed_ms,
            round(sum(exposed_ns) / any_value(train), 4) AS share
        FROM step_parts, counted WHERE axis NOT IN ('compute', 'host', 'step') AND {_ORDINARY}
        GROUP BY axis, name ORDER BY share DESC, axis, name""",
    ),
    "step-time": ReadyQuery(
        "time of ordinary steps on rank 0, and MFU, by attempts and twentieths of the run",
        f"""
        WITH timed AS (
            SELECT *, ntile(20) OVER (ORDER BY start_ns) AS part FROM steps WHERE rank = 0 AND {_ORDINARY}
        ), peak AS (SELECT attempt, sum(peak_flops) AS peak FROM ranks GROUP BY attempt)
        SELECT attempt, min(step) AS first, max(step) AS last, round(median(train_ns) / 1e6, 3) AS median_ms,
            round(quantile_cont(train_ns, 0.95) / 1e6, 3) AS p95_ms, round(max(train_ns) / 1e6, 3) AS max_ms,
            round(sum(tokens) / sum(train_ns) * 1e9) AS tokens_per_s,
            round(sum(flops) / nullif(sum(train_ns * peak) / 1e9, 0), 4) AS mfu_full
        FROM timed JOIN peak USING (attempt) GROUP BY attempt, part ORDER BY part, attempt""",
    ),
    "tagged-steps": ReadyQuery(
        "steps that contain more than training, with the time that they took beyond it",
        """
        SELECT attempt, step, string_agg(DISTINCT tags, ',' ORDER BY tags) AS tags, count(*) AS ranks,
            round(max(train_ns) / 1e6, 3) AS train_ms, round(max(end_ns - start_ns - train_ns) / 1e6, 3) AS more_ms
        FROM steps WHERE tags <> '' GROUP BY attempt, step ORDER BY attempt, step""",
    ),
    "data-stalls": ReadyQuery(
        "steps in which a rank waited longest for its batch",
        """
        SELECT attempt, step, rank, round(exposed_ns / 1e6, 3) AS waited_ms, round(exposed_ns / train_ns, 4) AS share
        FROM step_parts JOIN steps USING (attempt, rank, step)
        WHERE axis = 'host' AND name = 'data' ORDER BY exposed_ns DESC, attempt, step, rank LIMIT 20""",
    ),
    "gc": ReadyQuery(
        "Python's garbage collections by rank: their number, sum and longest",
        """
        SELECT rank, sum(count) AS collections, count(*) AS steps, round(sum(total_ns) / 1e6, 3) AS ms,
            round(max(max_ns) / 1e6, 3) AS longest_ms
        FROM step_parts WHERE axis = 'host' AND name = 'gc' GROUP BY rank ORDER BY ms DESC, rank LIMIT 20""",
    ),
    "entry-spread": ReadyQuery(
        "when ranks issue their last reduction of gradients over dp and cp: first to last of a group, by step",
        """
        WITH last AS (
            SELECT attempt, step, tp, pp, rank, max(last_issue_ns) AS ns
            FROM step_parts JOIN ranks USING (attempt, rank)
            WHERE axis IN ('dp', 'edp') AND name IN ('reduce_scatter', 'all_reduce') AND step > 0 GROUP BY ALL
        ), spread AS (SELECT attempt, step, max(ns) - min(ns) AS ns, arg_max(rank, ns) AS rank FROM last
            GROUP BY attempt, step, tp, pp)
        SELECT attempt, step, round(max(ns) / 1e6, 3) AS widest_ms, round(median(ns) / 1e6, 3) AS median_ms,
            arg_max(rank, ns) AS last_rank
        FROM spread GROUP BY attempt, step ORDER BY attempt DESC, step DESC LIMIT 20""",
    ),
    "longest-events": ReadyQuery(
        "the longest single events of the steps, without activities of the host",
        """
        SELECT attempt, step, rank, axis, name, part, layer, chunk, microbatch,
            round((end_ns - start_ns) / 1e6, 3) AS ms, round(exposed_ns / 1e6, 3) AS exposed_ms
        FROM events WHERE step > 0 AND axis <> 'host'
        ORDER BY end_ns - start_ns DESC, attempt, step, rank, start_ns LIMIT 20""",
    ),
    "start": ReadyQuery(
        "the parts of a start, up to the end of its first step: the median of the ranks, and the slowest",
        """
        WITH by_rank AS (
            SELECT attempt, rank, name, sum(end_ns - start_ns) AS ns, min(start_ns) AS begun
            FROM events WHERE axis = 'host' AND starts_with(name, 'start: ') GROUP BY ALL
        )
        SELECT attempt, name[8:] AS part, round(median(ns) / 1e9, 3) AS median_s, round(max(ns) / 1e9, 3) AS slowest_s,
            arg_max(rank, ns) AS slowest_rank
        FROM by_rank GROUP BY attempt, name ORDER BY attempt, min(begun)""",
    ),
    "memory": ReadyQuery(
        "ranks by the peak memory of their device",
        """
        SELECT rank, node, pp AS stage, round(max(peak_memory_bytes) / 1073741824, 3) AS peak_gib
        FROM steps JOIN ranks USING (attempt, rank) GROUP BY ALL ORDER BY peak_gib DESC, rank LIMIT 20""",
    ),
    "hosts": ReadyQuery(
        "the newest metrics of each node: cores busy, load, free memory",
        """
        SELECT node, round(arg_max(value, time_ns) FILTER (metric = 'cpu.percent'), 1) AS cpu_percent,
            round(arg_max(value, time_ns) FILTER (metric = 'cpu.load'), 2) AS load,
            round(arg_max(value, time_ns) FILTER (metric = 'memory.available') / 1073741824, 2) AS free_gib,
            make_timestamp_ns(max(time_ns)) AS at_utc
        FROM host_metrics GROUP BY node ORDER BY node""",
    ),
    "states": ReadyQuery(
        "what each rank did when it was last seen",
        """
        SELECT rank, record ->> 'phase' AS phase, (record ->> 'step')::INTEGER AS step, record ->> '$.wait[0]' AS wait,
            record ->> '$.wait[1]' AS wait_group, (record ->> '$.wait[2]')::BIGINT AS sequence,
            round(((record ->> 'read_ns')::BIGINT - (record ->> 'updated_ns')::BIGINT) / 1e9, 2) AS idle_s
        FROM states QUALIFY row_number() OVER (PARTITION BY rank ORDER BY time_ns DESC) = 1
        ORDER BY idle_s DESC, rank""",
    ),
    "lost-events": ReadyQuery(
        "events that were overwritten before they were stored, by rank",
        """
        SELECT rank, sum(events_lost) AS lost, count(*) FILTER (events_lost > 0) AS steps
        FROM steps GROUP BY rank HAVING lost > 0 ORDER BY lost DESC, rank""",
    ),
}
