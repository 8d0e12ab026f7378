"""Diagnosis of nodes: `run_check` measures on this node, for the agent; comparisons name the node or link at fault."""

from megascale.fault.checks.process import run_check as run_check
from megascale.fault.checks.result import CheckResult as CheckResult
