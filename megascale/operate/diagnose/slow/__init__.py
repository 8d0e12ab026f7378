"""Causes of a slow run, by its event store; no torch needed. A module imports only those that come after it:

1. `findings`: all causes, each once, and what each cost
2. `stragglers`, `slow_links`, `drift`: suspects
3. `heatmap`, `mfu_breakdown`
4. `job_cost`, `step_levels`, `finding`, `peers`
5. `cube_queries`, `step_cube`: the times of a run, read from its store

Beside them `host_outliers` finds faulty hosts by their metrics, which `host_series` reads.
"""
