"""Checks of a node: one file for every check without torch, the table of all checks, and their processes.

- `result`: CheckResult; `table`: CHECKS and CHECK_SETS; `runner`: run_check, which starts `check_process`
- `host_memory`, `disk`, `loopback`, `node_limits`: the node alone
- `endpoint`: the server of a node for other nodes' checks; `reach`, `clock_offset`, `link`: the node toward other nodes

Checks of the device, with torch, stand in `megascale.bench.checks`: a process for the check alone imports them.
"""
