"""The dashboard and the alert rules query existing metrics, and alerts fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.core.errors import all_errors
from tests.conftest import ROOT

FOLDER = ROOT / "docker" / "observability"
DASHBOARD = json.loads((FOLDER / "grafana" / "kith.json").read_text())
BUILT_IN_LABELS = {"instance", "job", "le"}
"""Labels that Prometheus adds to every series, and the bucket label of histograms."""


def documented_metrics() -> list[tuple[str, str, frozenset[str]]]:
    """Return name, type and labels of each metric of docs/observability.md."""
    text = (ROOT / "docs" / "observability.md").read_text()
    lines = re.findall(r"^\| `((?:kith|process)_\w+)` \| (\w+) \|(.*?)\|", text, re.MULTILINE)
    return [(name, kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in lines]


def documented() -> dict[str, frozenset[str]]:
    """Return the documented labels by metric; test_metrics compares them with a real scrape."""
    return {name: labels for name, _, labels in documented_metrics()}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def targets() -> list[dict[str, Any]]:
    return [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def metrics_of(expression: str) -> set[str]:
    """Return the metrics of an expression. Raises AssertionError for an unknown metric or label."""
    known = documented()
    outside = re.sub(r'"[^"]*"', '""', expression)
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:kith|process)_\w+", outside)}
    assert names <= known.keys(), expression
    labels = BUILT_IN_LABELS.union(*(known[name] for name in names))
    for inside in re.findall(r"\{([^}]*)\}", outside):
        assert set(re.findall(r"(\w+)\s*(?:=|!)", inside)) <= labels, expression
    for grouped in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", outside):
        assert set(re.findall(r"\w+", grouped)) <= labels, expression
    return names


@pytest.mark.parametrize("expression", [rule["expr"] for rule in rules()] + [target["expr"] for target in targets()])
def test_queries_name_documented_metrics_and_labels(expression: str) -> None:
    assert metrics_of(expression) or "up{" in expression


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for target in targets() for name in metrics_of(target["expr"])}
    assert documented().keys() - shown == {"process_virtual_memory_bytes", "process_start_time_seconds"}


def test_error_codes_in_rules_exist() -> None:
    text = (FOLDER / "alerts.yml").read_text()
    (codes,) = re.findall(r'code=~"([^"]*)"', text)
    assert set(codes.split("|")) <= {error.code for error in all_errors()}


def test_the_dashboard_can_be_imported() -> None:
    panels = DASHBOARD["panels"]
    for name in ("id", "title"):
        assert len({panel[name] for panel in panels}) == len(panels)
    assert {target["datasource"]["uid"] for target in targets()} == {"${datasource}"}
    variables = {each["name"]: each["type"] for each in DASHBOARD["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"} == variables.keys()


def test_each_alert_has_a_remedy_and_is_documented() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    rows = {
        name: severity
        for severity, names in re.findall(r"^\| (critical|warning|info) \| (.*) \|$", text, re.MULTILINE)
        for name in re.findall(r"`(Kith\w+)`", names)
    }
    assert rows == {rule["alert"]: rule["labels"]["severity"] for rule in rules()}
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "todo"}
        assert len(rule["annotations"]["todo"]) > 40
    tested = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    assert {test["name"].partition(",")[0] for test in tested} == {*rows, "all is well"}


@pytest.mark.parametrize(
    "command",
    ["test rules alerts_test.yml", "check config --syntax-only prometheus.yml", "check rules alerts.yml panels.yml"],
)
def test_prometheus_accepts_rules_and_queries_and_alerts_fire_on_time(tmp_path: Path, command: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    for file in FOLDER.glob("*.yml"):
        shutil.copy(file, tmp_path)
    recorded = [
        {"record": f"panel:{number}", "expr": target["expr"].replace("$__rate_interval", "5m")}
        for number, target in enumerate(targets())
    ]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    done = subprocess.run([program, *command.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
