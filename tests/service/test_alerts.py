"""The dashboard and the alert rules ask for what there is, are in order, and fire for what they are for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from docker.observability.dashboard import COLUMNS, PATH, dashboard
from service.errors import all_errors
from tests.conftest import ROOT

FOLDER = ROOT / "docker" / "observability"
PROMETHEUS = {"instance", "job", "le"}
"""Labels that every series has, and every histogram's."""


def documented() -> dict[str, set[str]]:
    """Labels by metric, which test_metrics compares with what a server tells."""
    lines = (ROOT / "docs" / "observability.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if re.match(r"\| `(kith|process)_", line)
    ]
    return {name.strip("`"): set(re.findall(r"`(\w+)`", labels)) for name, _, labels, _ in cells}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def targets() -> list[dict[str, Any]]:
    return [target for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def asked(expression: str) -> set[str]:
    """Metrics of an expression; raises AssertionError where it names one, or a label, that there is not."""
    known = documented()
    outside = re.sub(r'"[^"]*"', '""', expression)
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:kith|process)_\w+", outside)}
    assert names <= known.keys(), expression
    labels = PROMETHEUS.union(*(known[name] for name in names))
    for inside in re.findall(r"\{([^}]*)\}", outside):
        assert set(re.findall(r"(\w+)\s*(?:=|!)", inside)) <= labels, expression
    for grouped in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", outside):
        assert set(re.findall(r"\w+", grouped)) <= labels, expression
    return names


@pytest.mark.parametrize("expression", [rule["expr"] for rule in rules()] + [target["expr"] for target in targets()])
def test_what_is_asked_for_is_there(expression: str) -> None:
    assert asked(expression) or "up{" in expression


def test_whatever_is_told_is_shown() -> None:
    """But for what no graph is made of."""
    shown = {name for target in targets() for name in asked(target["expr"])}
    assert documented().keys() - shown == {"process_virtual_memory_bytes", "process_start_time_seconds"}


def test_a_name_or_a_label_that_there_is_not_is_found() -> None:
    for wrong in ("kith_requests_total", 'kith_ready{stage="decode"}', "sum by (subject) (kith_ready)"):
        with pytest.raises(AssertionError):
            asked(wrong)


def test_codes_and_labels_in_rules_exist() -> None:
    text = (FOLDER / "alerts.yml").read_text()
    (codes,) = re.findall(r'code=~"([^"]*)"', text)
    assert set(codes.split("|")) <= {error.code for error in all_errors()}


def test_the_file_is_what_is_made() -> None:
    assert json.loads(PATH.read_text()) == dashboard(), "python -m docker.observability.dashboard"


def test_the_dashboard_can_be_imported() -> None:
    made = dashboard()
    panels = made["panels"]
    numbers = [panel["id"] for panel in panels]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= COLUMNS
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies on another"
        taken |= cells
    assert made["templating"]["list"][0] == {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }
    sources = {target["datasource"]["uid"] for target in targets()}
    assert sources == {"${datasource}"}
    variables = {each["name"] for each in made["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(made))) - {"__rate_interval", "__all"}
    assert used == variables
    assert len({panel["title"] for panel in panels}) == len(panels)


def test_each_alert_says_what_to_do_and_is_documented() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    rows = {name: said for name, *said in re.findall(r"^\| `(Kith\w+)` \| (\w+) \| (.*) \|$", text, re.MULTILINE)}
    assert rows == {
        rule["alert"]: [rule["labels"]["severity"], rule["annotations"]["todo"].strip()] for rule in rules()
    }
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "todo"}
        assert len(rule["annotations"]["todo"]) > 40
    tested = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    assert {test["name"].partition(",")[0] for test in tested} == {*rows, "all is well"}


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return found


def test_the_rules_fire_when_they_should_and_not_before() -> None:
    done = subprocess.run(
        [promtool(), "test", "rules", str(FOLDER / "alerts_test.yml")], cwd=FOLDER, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_configuration(tmp_path: Path) -> None:
    for file in ("prometheus.yml", "alerts.yml"):
        shutil.copy(FOLDER / file, tmp_path)
    done = subprocess.run(
        [promtool(), "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([promtool(), "check", "rules", str(tmp_path / "alerts.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_expression_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    recorded = [
        {"record": f"panel:{number}", "expr": target["expr"].replace("$__rate_interval", "5m")}
        for number, target in enumerate(targets())
    ]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    done = subprocess.run([promtool(), "check", "rules", str(tmp_path / "panels.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
