"""Traces as a collector gets them: OTLP over HTTP, from a real server to a small one that reads what it is sent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kith import Kith, KithClientError
from service.core.errors import SettingsError
from service.server import embedded
from service.settings import load_settings
from tests.conftest import ROOT, jpeg

PERSON = "xochiquetzal"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.headers: list[str | None] = []
        self.bodies = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies += body
        self.server.headers.append(self.headers["X-Tenant"])
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append({each.key: each.value.string_value for each in resource.resource.attributes})
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory, astronaut: NDArray[np.uint8]) -> Iterator[Collector]:
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=museum")
        patch.setenv("OTEL_SERVICE_NAME", "kith-at-the-door")
        folder = tmp_path_factory.mktemp("traced")
        with embedded(load_settings(data_dir=folder, log_level="WARNING", traces_url=collector.url)) as url:
            with Kith(url) as kith:
                kith.create_gallery("g")
                kith.enroll("g", PERSON, jpeg(astronaut))
                with pytest.raises(KithClientError):
                    kith.subject("g", f"{PERSON}-other")
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "Content-Type": "image/jpeg"}
            httpx.post(f"{url}/v1/galleries/g/identify", content=jpeg(astronaut), headers=headers).raise_for_status()
            unsampled = {"traceparent": f"00-{'1' * 32}-{PARENT}-00"}
            httpx.get(f"{url}/healthz", headers=unsampled).raise_for_status()
            httpx.get(f"{url}/healthz", headers={"traceparent": f"no {PERSON}"}).raise_for_status()
        yield collector  # the server is closed, and has sent all


def attributes(span: Span) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def one(spans: list[Span], name: str) -> Span:
    (found,) = [span for span in spans if span.name == name]
    return found


def test_a_request_is_a_span_of_its_senders_trace_with_a_span_for_each_stage(collected: Collector) -> None:
    spans = [span for span in collected.spans if span.trace_id.hex() == TRACE]
    request = one(spans, "POST /v1/galleries/{gallery}/identify")
    assert request.parent_span_id.hex() == PARENT
    assert request.kind == Span.SPAN_KIND_SERVER
    told = attributes(request)
    assert len(str(told.pop("kith.request_id"))) == 32
    route = "/v1/galleries/{gallery}/identify"
    assert told == {"http.request.method": "POST", "http.route": route, "http.response.status_code": 200}
    stages = {span.name for span in spans if span.parent_span_id == request.span_id}
    assert stages == {"read", "decode", "detect", "align", "embed", "follow", "search"}
    for span in spans:
        assert request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano


def test_waiting_for_a_batch_and_the_batch_are_told_apart_and_linked(collected: Collector) -> None:
    spans = [span for span in collected.spans if span.trace_id.hex() == TRACE]
    detect = one(spans, "detect")
    inside = [span for span in spans if span.parent_span_id == detect.span_id]
    wait, run = one(inside, "wait"), one(inside, "run")
    assert wait.end_time_unix_nano == run.start_time_unix_nano
    (link,) = run.links
    (batch,) = [span for span in collected.spans if (span.trace_id, span.span_id) == (link.trace_id, link.span_id)]
    assert batch.name.startswith("batch detector/")
    assert attributes(batch)["kith.items"] == 1
    assert [(each.trace_id, each.span_id) for each in batch.links] == [(detect.trace_id, detect.span_id)]


def test_errors_are_told_by_their_code_and_nobody_is(collected: Collector) -> None:
    lost = one(collected.spans, "GET /v1/galleries/{gallery}/subjects/{subject}")
    assert attributes(lost)["error.type"] == "subject_not_found"
    assert PERSON.encode() not in collected.bodies
    assert not any(span.events for span in collected.spans)
    assert not any(span.status.message for span in collected.spans)


def test_who_is_not_sampled_is_not_sent_and_what_is_no_traceparent_is_ignored(collected: Collector) -> None:
    healths = [span for span in collected.spans if span.name == "GET /healthz"]
    assert [span.parent_span_id for span in healths] == [b""]


def test_the_standard_variables_of_the_exporter_hold(collected: Collector) -> None:
    assert set(collected.headers) == {"museum"}
    assert {resource["service.name"] for resource in collected.resources} == {"kith-at-the-door"}
    assert all(resource["service.version"] for resource in collected.resources)


def test_a_collector_that_is_away_holds_nobody_up(tmp_path: Path) -> None:
    with collecting() as gone:
        url = gone.url
    with embedded(load_settings(data_dir=tmp_path, log_level="ERROR", traces_url=url)) as server:
        assert httpx.get(f"{server}/healthz").is_success


def test_the_frameworks_own_telemetry_stays_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would send paths, and so people's ids."""
    with collecting() as collector:
        monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.removesuffix("/v1/traces"))
        with embedded(load_settings(data_dir=tmp_path, log_level="ERROR")) as url:
            assert httpx.get(f"{url}/v1/galleries/{PERSON}").status_code == 404
        assert collector.bodies == b""


def test_without_its_package_the_settings_are_refused(tmp_path: Path) -> None:
    without = (
        "import sys; sys.modules['opentelemetry.exporter'] = None\n"
        "from service.server import serve; from service.settings import load_settings\n"
        "from service.core.errors import SettingsError\n"
        "try: serve(load_settings())\n"
        "except SettingsError as error: print(error)"
    )
    environment = {"KITH_DATA_DIR": str(tmp_path), "KITH_TRACES_URL": "http://127.0.0.1:4318/v1/traces"}
    done = subprocess.run(
        [sys.executable, "-c", without], env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True
    )
    assert "pip install '.[tracing]'" in done.stdout, done.stderr


@pytest.mark.parametrize("url", ["http://c:4318/v1/traces?key=s", "http://u:p@c/v1/traces", "http://c/#s", "ftp://c"])
def test_an_address_that_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"(?i)traces_url"):
        load_settings(traces_url=url)
