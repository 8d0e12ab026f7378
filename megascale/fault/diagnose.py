"""Diagnosis of nodes: `run_check` measures on this node, for the agent; comparisons name the node or link at fault."""

from megascale.fault.checks.result import CheckResult as CheckResult
from megascale.fault.checks.runner import run_check as run_check
