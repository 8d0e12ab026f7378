"""Checks of a node without torch, and the processes of all checks. `catalog.checks` is their table.

- `result`: CheckResult; `runner`: run_check, which starts `check_process`
- `host`: checks of the node alone; `paths`: of the paths to other nodes, by `endpoint`, a node's server for them
- `transfer`: the timed transfers of both
"""
