"""Alert rules: `promtool` accepts them, each fires in one of its tests and is silent in another, and asks for metrics
that are exported.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.operate.store.every_metric import every_name

RULES = Path(__file__).parents[3] / "configs" / "observe" / "alerts.yml"
TESTS = Path(__file__).parent / "alerts" / "alerts.test.yml"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")


@needs_promtool
def test_rules_are_valid() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_and_are_silent() -> None:
    done = subprocess.run(["promtool", "test", "rules", TESTS.name], cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_tests_can_fail(tmp_path: Path) -> None:
    """With limits that nothing reaches, the tests of the alerts fail."""
    text = RULES.read_text().replace("> 1.1", "> 100")
    assert text != RULES.read_text()
    (tmp_path / "alerts.yml").write_text(text)
    (tmp_path / "test.yml").write_text(TESTS.read_text().replace("../../../configs/observe/", ""))
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "MegascaleSlowRank" in done.stdout + done.stderr


def test_every_alert_has_a_test_that_fires_and_one_that_is_silent() -> None:
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    checks = re.findall(r"alertname: (\w+)\n\s+exp_alerts:( \[\])?", TESTS.read_text())
    assert {name for name, empty in checks if empty} == alerts
    assert {name for name, empty in checks if not empty} == alerts
    assert all(name.startswith("Megascale") for name in alerts)


def test_rules_ask_for_metrics_that_are_exported(tmp_path: Path) -> None:
    text = "\n".join(line.partition(" #")[0] for line in RULES.read_text().splitlines() if "megascale-" not in line)
    asked = set(re.findall(r"\bmegascale_\w+", text))
    assert asked
    assert asked - every_name(tmp_path) == set()


def test_every_alert_has_a_severity_and_a_summary() -> None:
    for rule in re.split(r"\n      - ", RULES.read_text())[1:]:
        if rule.startswith("alert:"):
            assert re.search(r"severity: (critical|warning|info)\}", rule), rule
            assert "summary:" in rule, rule
