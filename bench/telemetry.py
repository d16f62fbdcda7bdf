"""Measure the CPU cost of metrics, traces and logs per request, and of a scrape.

Figures are CPU time, not wall time, and the minimum of the rounds. Spans go to an address without a listener. The cost
therefore includes creating the spans and encoding them, which a thread does meanwhile.

    python -m bench.telemetry [--times 20000]
"""

from __future__ import annotations

import argparse
import io
import logging
import time
from collections.abc import Callable
from typing import Any

from service.core.actor import Actor, acting_as
from service.core.error_catalog import all_errors
from service.domain.decision import IdentifyOutcome
from service.domain.gallery import GalleryCounts
from service.observability.drift import WINDOW, Decided, Watches
from service.observability.logs import TEXT, JsonLines
from service.observability.metrics import Metrics
from service.observability.probe_windows import ProbeWindows
from service.observability.tracing import Tracing
from service.services.metrics_export import BuildInfo, MetricsExport
from service.services.status import Lag, Sample, Samples

ROUNDS = 5
STAGES = ("read", "decode", "detect", "align", "embed", "search")
"""Stages of an identification."""
NOWHERE = "http://127.0.0.1:9/v1/traces"
SAMPLED, UNSAMPLED = (f"00-{'1' * 32}-{'2' * 16}-{flag}" for flag in ("01", "00"))
OUTCOMES: tuple[IdentifyOutcome, ...] = ("identified", "unknown")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20_000)
    times = parser.parse_args().times
    logging.getLogger("opentelemetry").setLevel("CRITICAL")
    logging.getLogger("urllib3").setLevel("CRITICAL")
    with acting_as(Actor("operator", "0" * 32)):
        for what, microseconds in measured(times).items():
            print(f"{what:<64} {microseconds:8.1f} us")


def measured(times: int) -> dict[str, float]:
    plain, tracing = Metrics(), Tracing(NOWHERE, "0")
    traced = Metrics(spans=tracing)
    found = {
        "a stage": _each(lambda: _stage(plain), times),
        "an identification: its stages, photo, request": _each(lambda: _request(plain, None), times),
        "the same with traces, this one not sampled": _each(lambda: _request(traced, UNSAMPLED), times),
        "the same with traces, this one sampled": _each(lambda: _request(traced, SAMPLED), times // 20),
    }
    tracing.close()
    for name, formatter in (("text", logging.Formatter(TEXT)), ("JSON", JsonLines())):
        log = _log(formatter)
        found[f"a request's line of the log, {name}"] = _each(lambda log=log: _line(log), times)  # type: ignore[misc]
    for galleries in (1, 100):
        telemetry = _telemetry(galleries)
        found[f"a scrape, {galleries} galleries with a window full of decisions"] = _each(telemetry.text, 5)
    return found


def _stage(metrics: Metrics) -> None:
    with metrics.stage("detect"):
        pass


def _request(metrics: Metrics, traceparent: str | None) -> None:
    with metrics.trace_request("POST", traceparent) as span:
        for stage in STAGES:
            with metrics.stage(stage):  # type: ignore[arg-type]
                pass
        metrics.observe_photo([0.5])
        metrics.observe_similarity("pack", "identified", 0.7)
        metrics.observe_request("POST", "/v1/galleries/{gallery}/identify", 200, 0.01)
        if span is not None:
            span.answered("POST /v1/identify", "/v1/identify", 200, None, "0" * 32)


def _log(formatter: logging.Formatter) -> logging.Logger:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(formatter)
    log = logging.Logger("service.access")
    log.addHandler(handler)
    return log


def _line(log: logging.Logger) -> None:
    fields = {
        "request_id": "0" * 32,
        "method": "POST",
        "route": "/v1/detect",
        "status": 200,
        "ms": 9.1,
        "caller": "key:1",
    }
    log.info("%s %s %s %d %.1f ms", "0" * 32, "POST", "/v1/detect", 200, 9.1, extra={"fields": fields})


def _telemetry(galleries: int) -> MetricsExport:
    names = [f"gallery-{number}" for number in range(galleries)]
    watches, metrics = Watches({}), Metrics(error.code for error in all_errors())
    for pk, name in enumerate(names):
        decided = [Decided(OUTCOMES[number % 2], 0.5, 0.4) for number in range(2 * WINDOW)]
        watches.of(pk, name, "f").add(decided)
    for route in range(30):
        metrics.observe_request("GET", f"/v1/{route}", 200, 0.01)
    for stage in STAGES:
        _stage_of(metrics, stage)
    lags, sizes = dict.fromkeys(names, Lag(0, 0)), GalleryCounts(galleries, 1, 1, dict.fromkeys(names, (1, 1)))
    samples = Samples(lambda: Sample(time.time(), {}, sizes, {}, lags), fresh_s=float("inf"))
    samples.latest()
    return MetricsExport(BuildInfo("0", "pack", {}), metrics, watches, [], lambda: (0, 0), samples, 100, ProbeWindows())


def _stage_of(metrics: Metrics, stage: Any) -> None:
    with metrics.stage(stage):
        pass


def _each(one: Callable[[], object], times: int) -> float:
    least = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(times):
            one()
        least = min(least, time.process_time() - begun)
    return least * 1e6 / times


if __name__ == "__main__":
    main()
