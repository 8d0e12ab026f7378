"""Checks of a node: one file for every check without torch, the table of all checks, and their processes.

- `result`: CheckResult; `table`: CHECKS and CHECK_SETS; `process`: run_check
- `memory`, `disk`, `loopback`, `limits`: the node alone
- `endpoint`: the server of a node for other nodes' checks; `reach`, `clock`, `link`: the node toward other nodes

Checks of the device, with torch, stand in `megascale.bench.checks`: a process for the check alone imports them.
"""
