"""Dashboards of a job: overview, ranks and incidents."""

from __future__ import annotations

from grafana_panels import RUN, Board, Panel, rate, ten, value

TOKENS = f"sum({rate('tokens')})"
MFU = f"sum({rate('model_flops')}) / sum(megascale_peak_flops_per_second{{{RUN}}} > 0)"
SHARE_OF_TRAINING = f"sum({rate('rank_train_seconds')})"

OVERVIEW = Board(
    "megascale-overview",
    "megascale: job",
    (
        (
            "Now",
            (
                value("Step", "none", f"max(megascale_rank_step{{{RUN}}})"),
                value("Loss", "none", f"max(megascale_loss{{{RUN}}})"),
                value("Tokens/s", "short", TOKENS),
                value("MFU", "percentunit", MFU, "Full-attention convention; empty where the peak is unknown."),
                value("Ranks with metrics", "none", f"count(megascale_rank_step{{{RUN}}})"),
                value("Without progress", "s", f"min(megascale_rank_idle_seconds{{{RUN}}})", "The liveliest rank."),
            ),
        ),
        (
            "Training",
            (
                Panel("Loss", "none", ((f"megascale_loss{{{RUN}}}", "loss"),)),
                Panel("Gradient norm", "none", ((f"megascale_grad_norm{{{RUN}}}", "before clipping"),), log=True),
                Panel("Tokens/s", "short", ((TOKENS, "tokens/s"),)),
                Panel("MFU", "percentunit", ((MFU, "MFU, full attention"),)),
                Panel(
                    "Step time",
                    "s",
                    (
                        (f"max(megascale_rank_step_time_seconds{{{RUN}}})", "slowest rank"),
                        (f"min(megascale_rank_step_time_seconds{{{RUN}}})", "fastest rank"),
                    ),
                    help="Median of each rank's recent steps.",
                ),
                Panel("Step", "none", ((f"max(megascale_rank_step{{{RUN}}})", "step"),)),
            ),
        ),
        (
            "Where the time goes, mean of all ranks",
            (
                Panel(
                    "Exposed communication",
                    "percentunit",
                    (
                        (
                            f"sum by (axis) ({rate('rank_exposed_communication_seconds')})"
                            f" / on () group_left () {SHARE_OF_TRAINING}",
                            "{{axis}}",
                        ),
                    ),
                    help="Share of training time in which compute waits for communication.",
                ),
                Panel(
                    "Data, garbage collection, evaluation, checkpoints",
                    "percentunit",
                    (
                        (
                            f"sum by (activity) ({rate('rank_host_seconds')})"
                            f" / on () group_left () {SHARE_OF_TRAINING}",
                            "{{activity}}",
                        ),
                    ),
                ),
                Panel(
                    "Compute",
                    "percentunit",
                    ((f"sum({rate('rank_compute_seconds')}) / {SHARE_OF_TRAINING}", "compute"),),
                ),
            ),
        ),
        (
            "Checkpoints and spikes",
            (
                Panel(
                    "Age of the last checkpoint",
                    "s",
                    ((f"time() - max(megascale_checkpoint_timestamp_seconds{{{RUN}}})", "age"),),
                ),
                Panel(
                    "Steps since the last checkpoint",
                    "none",
                    ((f"max(megascale_rank_step{{{RUN}}}) - max(megascale_checkpoint_step{{{RUN}}})", "steps"),),
                ),
                Panel(
                    "Spikes and failed checkpoints",
                    "none",
                    (
                        (f"max(megascale_spike_alerts_total{{{RUN}}})", "spikes of loss or norm"),
                        (f"max(megascale_checkpoint_failures_total{{{RUN}}})", "checkpoints not written"),
                    ),
                ),
            ),
        ),
    ),
)


COMPUTE = f"{rate('rank_compute_seconds')} * on (run, node, rank) group_left (pp) megascale_rank_info"
OF_STAGE = f"{COMPUTE} / on (run, pp) group_left () quantile by (run, pp) (0.5, {COMPUTE})"
OF_RANK = f"/ sum by (rank, node) ({rate('rank_train_seconds')})"
DATA = 'run="$run", activity="data"'
WAITS = f"sum by (rank, node) ({rate('rank_host_seconds', DATA)}) {OF_RANK}"
STEP_TIME = f"megascale_rank_step_time_seconds{{{RUN}}}"

RANKS = Board(
    "megascale-ranks",
    "megascale: ranks and stragglers",
    (
        (
            "Slow ranks: the ten slowest",
            (
                ten(
                    "Compute, multiples of the median of the pipeline stage",
                    "none",
                    OF_STAGE,
                    "Above 1.1 for long: a slow device or host.",
                    "rank {{rank}} on {{node}}, stage {{pp}}",
                ),
                ten(
                    "Exposed communication",
                    "percentunit",
                    f"sum by (rank, node) ({rate('rank_exposed_communication_seconds')}) {OF_RANK}",
                    "Ranks that wait are not those that are slow.",
                ),
                ten(
                    "Waits for data",
                    "percentunit",
                    WAITS,
                ),
            ),
        ),
        (
            "Progress",
            (
                Panel(
                    "Step time",
                    "s",
                    (
                        (f"max({STEP_TIME})", "max"),
                        (f"quantile(0.5, {STEP_TIME})", "median"),
                        (f"min({STEP_TIME})", "min"),
                    ),
                ),
                Panel("Ranks by phase", "none", ((f"count by (phase) (megascale_rank_phase{{{RUN}}})", "{{phase}}"),)),
                ten("Without progress", "s", f"megascale_rank_idle_seconds{{{RUN}}}"),
                ten(
                    "Without a heartbeat",
                    "s",
                    f"megascale_rank_heartbeat_age_seconds{{{RUN}}}",
                    "A stopped process, or one whose code holds Python's lock.",
                ),
                ten(
                    "Steps behind the first rank",
                    "none",
                    f"max(megascale_rank_step{{{RUN}}}) - on () group_right () megascale_rank_step{{{RUN}}}",
                ),
            ),
        ),
        (
            "Processes",
            (
                ten("Memory on the host", "bytes", f"megascale_rank_resident_memory_bytes{{{RUN}}}"),
                Panel(
                    "Events lost",
                    "short",
                    ((f"sum by (node) ({rate('rank_events_lost')})", "{{node}}"),),
                    help="Records that were overwritten before the collector read them, per second.",
                ),
                Panel(
                    "Age of the processes",
                    "s",
                    ((f"time() - max by (node) (megascale_rank_start_time_seconds{{{RUN}}})", "{{node}}"),),
                ),
            ),
        ),
    ),
)


INCIDENTS = Board(
    "megascale-incidents",
    "megascale: incidents",
    (
        (
            "Now",
            (
                value("Incidents", "none", f"sum(megascale_job_incidents_total{{{RUN}}})"),
                value("Attempts", "none", f"max(megascale_job_attempts_total{{{RUN}}})"),
                value("Steps lost", "none", f"max(megascale_job_steps_lost_total{{{RUN}}})"),
                value("Time lost to recoveries", "s", f"max(megascale_job_recovery_seconds_total{{{RUN}}})"),
                value("Spares", "none", f'max(megascale_job_nodes{{{RUN}, state="spare"}})'),
                value("Missing nodes", "none", f'max(megascale_job_nodes{{{RUN}, state="missing"}})'),
            ),
        ),
        (
            "Incidents",
            (
                Panel("By class", "none", ((f"megascale_job_incidents_total{{{RUN}}} > 0", "{{class}}"),)),
                Panel("Actions", "none", ((f"megascale_job_actions_total{{{RUN}}} > 0", "{{action}}"),)),
                Panel("Without a new step since", "none", ((f"megascale_job_incidents_open{{{RUN}}}", "open"),)),
                Panel("The driver's stage", "none", ((f"megascale_job_stage{{{RUN}}}", "{{stage}}"),)),
            ),
        ),
        (
            "Nodes",
            (
                Panel("Nodes by state", "none", ((f"megascale_job_nodes{{{RUN}}}", "{{state}}"),)),
                Panel(
                    "Last message of agents: the ten oldest",
                    "s",
                    ((f"topk(10, megascale_job_node_heartbeat_age_seconds{{{RUN}}})", "{{node}}"),),
                ),
                Panel(
                    "Agents without a driver", "s", ((f"megascale_agent_driver_lost_seconds{{{RUN}}} > 0", "{{node}}"),)
                ),
                Panel("Drivers of this launch", "none", ((f"megascale_job_driver_starts_total{{{RUN}}}", "drivers"),)),
            ),
        ),
    ),
)

MARKS = (
    ("restarts", "orange", f"changes(megascale_job_attempts_total{{{RUN}}}[1m]) > 0"),
    ("incidents", "red", f"sum(increase(megascale_job_incidents_total{{{RUN}}}[1m])) > 0"),
)
"""Marks in the curves of all dashboards: name, colour and query."""
