"""Checks of a node's devices, with torch: functions of the table in `operate.health.checks.table`, one in a file.

A process that `checks.runner` starts for the check calls the function; on a host without GPUs the device is the
CPU. Functions take the check's arguments and return a CheckResult.
"""
