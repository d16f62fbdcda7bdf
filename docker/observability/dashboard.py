"""The Grafana dashboard, as a document: python -m docker.observability.dashboard writes grafana/kith.json, which
Grafana imports. A test says whether that is what this makes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PATH: Final = Path(__file__).parent / "grafana" / "kith.json"
COLUMNS: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
HERE: Final = 'instance=~"$instance"'
OF: Final = f'{HERE}, gallery=~"$gallery"'
RATE: Final = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """``queries``: PromQL and how its series are called; ``width``: of 24 columns."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"
    about: str = ""


def rate(metric: str, by: str, labels: str = HERE) -> str:
    return f"sum by ({by}) (rate({metric}{{{labels}}}[{RATE}]))"


def quantile(share: float, histogram: str, by: str, labels: str = HERE) -> str:
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({histogram}_bucket{{{labels}}}[{RATE}])))"


def mean(histogram: str, by: str, labels: str = HERE) -> str:
    return f"{rate(f'{histogram}_sum', by, labels)} / {rate(f'{histogram}_count', by, labels)}"


SERVED: Final = f'{HERE}, lane="requests"'
ROWS: Final[dict[str, list[Panel]]] = {
    "At a glance": [
        Panel(
            "Ready",
            [(f"kith_ready{{{HERE}}}", "{{instance}}")],
            width=4,
            kind="stat",
            about="1: all that is needed works",
        ),
        Panel("What fails", [(f"kith_check_ok{{{HERE}}} == 0", "{{instance}} {{check}}")], width=4, kind="stat"),
        Panel(
            "Requests a second",
            [(f"sum(rate(kith_request_seconds_count{{{HERE}}}[{RATE}]))", "requests")],
            "reqps",
            4,
            "stat",
        ),
        Panel(
            "Galleries, subjects, templates",
            [(f"max(kith_{each})", each) for each in ("galleries", "subjects", "templates")],
            width=6,
            kind="stat",
        ),
        Panel(
            "What runs",
            [
                (f"count by (version, pack) (kith_build_info{{{HERE}}})", "{{version}} {{pack}}"),
                (
                    f"count by (network, engine, precision, provider) (kith_network_info{{{HERE}}})",
                    "{{network}}: {{engine}} {{precision}} {{provider}}",
                ),
            ],
            width=6,
            kind="stat",
        ),
    ],
    "Traffic": [
        Panel(
            "Requests by route",
            [(rate("kith_request_seconds_count", "method, route"), "{{method}} {{route}}")],
            "reqps",
        ),
        Panel("By status", [(rate("kith_request_seconds_count", "status"), "{{status}}")], "reqps"),
        Panel("Refused and failed, by code", [(f"{rate('kith_problems_total', 'code')} > 0", "{{code}}")], "reqps"),
        Panel(
            "Whole requests, 50 and 99 of 100",
            [(quantile(q, "kith_request_seconds", "route"), f"{q:.0%} {{{{route}}}}") for q in (0.5, 0.99)],
            "s",
            16,
        ),
        Panel("Under way", [(f"kith_requests_in_progress{{{HERE}}}", "{{instance}}")]),
    ],
    "Latency by stage": [
        Panel("Stages of requests, mean", [(mean("kith_stage_seconds", "stage", SERVED), "{{stage}}")], "s", 12),
        Panel(
            "Stages of requests, 99 of 100",
            [(quantile(0.99, "kith_stage_seconds", "stage", SERVED), "{{stage}}")],
            "s",
            12,
        ),
    ],
    "Queues and batches": [
        Panel("Waiting", [(f"kith_queue_items{{{HERE}}}", "{{network}} {{lane}}")]),
        Panel("Wait, 99 of 100", [(quantile(0.99, "kith_queue_wait_seconds", "network"), "{{network}}")], "s"),
        Panel("A batch takes, mean", [(mean("kith_batch_seconds", "network"), "{{network}}")], "s"),
        Panel("Items of a batch, mean", [(mean("kith_batch_items", "network"), "{{network}}")]),
        Panel(
            "Share of the room in a batch, mean",
            [(mean("kith_batch_fill_ratio", "network"), "{{network}}")],
            "percentunit",
        ),
        Panel(
            "Turned away, and left undone",
            [
                (rate("kith_refused_total", "network"), "{{network}} refused"),
                (rate("kith_dropped_total", "network, reason"), "{{network}} {{reason}}"),
            ],
            "cps",
        ),
    ],
    "Decisions, risk and drift": [
        Panel("Decisions by outcome", [(rate("kith_identify_total", "outcome", OF), "{{outcome}}")], "cps"),
        Panel(
            "Share that finds nobody, and before",
            [
                (f"kith_unknown_rate{{{OF}}}", "{{gallery}} {{instance}}"),
                (f"kith_unknown_rate_before{{{OF}}}", "{{gallery}} {{instance}} before"),
            ],
            "percentunit",
        ),
        Panel(
            "Similarity of the identified, and as expected",
            [
                (f"kith_mated_similarity_mean{{{OF}}}", "{{gallery}} {{instance}}"),
                (f"kith_mated_similarity_expected{{{OF}}}", "{{gallery}} {{instance}} expected"),
            ],
            about="Lower than expected: older templates, another camera, or photos unlike those of the calibration.",
        ),
        Panel(
            "Galleries that drift",
            [(f'kith_drift_state{{{OF}, state=~"watch|drifted"}} == 1', "{{gallery}} {{state}} {{instance}}")],
            kind="stat",
        ),
        Panel(
            "Similarity of best candidates, median",
            [(quantile(0.5, "kith_similarity", "recogniser, outcome"), "{{recogniser}} {{outcome}}")],
        ),
        Panel(
            "Verifications, enrolments",
            [
                (rate("kith_verify_total", "outcome"), "verify {{outcome}}"),
                (rate("kith_enrol_total", "outcome"), "enrol {{outcome}}"),
                (rate("kith_probed_total", "reason"), "probed {{reason}}"),
            ],
            "cps",
        ),
        Panel(
            "Quality of faces, 10 and 50 of 100",
            [(quantile(q, "kith_face_quality", "lane"), f"{q:.0%} {{{{lane}}}}") for q in (0.1, 0.5)],
            width=12,
        ),
        Panel("Faces of a photo, mean", [(mean("kith_photo_faces", "lane"), "{{lane}}")], width=12),
    ],
    "Galleries and index": [
        Panel("Subjects", [(f"max by (gallery) (kith_gallery_subjects{{{OF}}})", "{{gallery}}")]),
        Panel("Templates", [(f"max by (gallery) (kith_gallery_templates{{{OF}}})", "{{gallery}}")]),
        Panel(
            "Changes that an index has yet to apply", [(f"kith_index_lag_lines{{{OF}}}", "{{gallery}} {{instance}}")]
        ),
        Panel("For how long", [(f"kith_index_lag_seconds{{{OF}}}", "{{gallery}} {{instance}}")], "s"),
        Panel("Jobs", [("max by (state) (kith_jobs)", "{{state}}")]),
        Panel(
            "The audit's lines that wait, or are lost",
            [
                (f"kith_audit_waiting{{{HERE}}}", "{{instance}} waiting"),
                (f"kith_audit_lost{{{HERE}}}", "{{instance}} lost"),
            ],
        ),
        Panel(
            "Retention that is paused, or waits for a confirmation",
            [
                (f"kith_retention_paused{{{HERE}}}", "{{instance}} paused"),
                (f"max by (gallery) (kith_retention_held{{{OF}}})", "{{gallery}} held"),
            ],
        ),
    ],
    "Process": [
        Panel("Processors", [(f"rate(process_cpu_seconds_total{{{HERE}}}[{RATE}])", "{{instance}}")], width=6),
        Panel("Memory", [(f"process_resident_memory_bytes{{{HERE}}}", "{{instance}}")], "bytes", 6),
        Panel(
            "Files open, of as many",
            [(f"process_open_fds{{{HERE}}} / process_max_fds{{{HERE}}}", "{{instance}}")],
            "percentunit",
            6,
        ),
        Panel(
            "Disk free",
            [(f"kith_disk_free_bytes{{{HERE}}} / kith_disk_size_bytes{{{HERE}}}", "{{instance}}")],
            "percentunit",
            6,
        ),
        Panel("Up for", [(f"time() - kith_start_time_seconds{{{HERE}}}", "{{instance}}")], "s", 12, "stat"),
        Panel(
            "Seconds since the database was looked at",
            [(f"kith_sample_age_seconds{{{HERE}}}", "{{instance}}")],
            "s",
            12,
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row, of_row in ROWS.items():
        panels.append(_placed(len(panels) + 1, row, "row", 0, y, COLUMNS, 1) | {"collapsed": False, "panels": []})
        x, y = 0, y + 1
        for panel in of_row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            panels.append(_placed(len(panels) + 1, panel.title, panel.kind, x, y, panel.width, HEIGHT) | _drawn(panel))
            x += panel.width
        y += HEIGHT
    return {
        "uid": "kith",
        "title": "Kith",
        "description": "Face recognition: docs/observability.md has every metric, and what to do.",
        "tags": ["kith"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [_source(), _variable("instance", "kith_build_info"), _variable("gallery", "kith_identify_total")]
        },
        "panels": panels,
    }


def _placed(number: int, title: str, kind: str, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"id": number, "title": title, "type": kind, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _drawn(panel: Panel) -> dict[str, Any]:
    letters = (chr(ord("A") + place) for place in range(len(panel.queries)))
    return {
        "description": panel.about,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"textMode": "value_and_name"} if panel.kind == "stat" else {"tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": letter, "expr": query, "legendFormat": legend, "datasource": SOURCE}
            for letter, (query, legend) in zip(letters, panel.queries, strict=True)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(label: str, metric: str) -> dict[str, Any]:
    query = f"label_values({metric}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n")
