"""Checks of a node with torch, which `catalog.checks` names.

- `device`: of a device alone
- `group_bandwidth`, `tiny_step`: by the ranks of a group, which `rank_group` opens

A process that `health.checks.runner` starts for the check calls the function; on a host without GPUs the device is the
CPU. Functions take the check's arguments and return a CheckResult.
"""
