"""Rigs for developers, as `python tools/lab COMMAND`: disturbed jobs, synthetic fleets, testbeds, replays."""

from __future__ import annotations

from pathlib import Path

LAB = str(Path(__file__).resolve().parent)
"""The folder that Python runs: `python tools/lab COMMAND`."""
