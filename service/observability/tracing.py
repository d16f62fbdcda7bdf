"""OpenTelemetry adapter: spans of requests, stages and network batches, exported by OTLP over HTTP.

The only module that imports OpenTelemetry, which is the extra tracing. Attributes never contain personal
data: the route's template instead of the path, the error code instead of its text. OTEL_TRACES_SAMPLER and
OTEL_TRACES_SAMPLER_ARG select the sampled requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.core.errors import KithError

NAME: Final = "kith"
CLOSE_TIMEOUT_S: Final = 2.0


class Tracing:
    """Source of trace spans. Safe to share between threads. Closing it sends the remaining spans."""

    def __init__(self, url: str, version: str) -> None:
        own = Resource({"service.name": NAME, "service.version": version})
        resource = own.merge(OTELResourceDetector().detect())
        # A separate thread sends spans, and drops them rather than block a request.
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._processor = BatchSpanProcessor(self._exporter)
        providers = TracerProvider(resource=resource), TracerProvider(sampler=ALWAYS_ON, resource=resource)
        for provider in providers:
            provider.add_span_processor(self._processor)
        # A batch belongs to several requests. It is recorded if at least one of them is sampled.
        self._tracer, self._batches = (provider.get_tracer(NAME, version) for provider in providers)
        self._incoming = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, method: str, traceparent: str | None) -> Iterator[RequestSpan]:
        """Return the span of a request; it is current inside the block.

        ``traceparent``: W3C Trace Context; an invalid value starts a new trace.
        """
        carrier = {} if traceparent is None else {"traceparent": traceparent}
        parent = self._incoming.extract(carrier, Context())
        attributes = {"http.request.method": method}
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, attributes)
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            yield RequestSpan(span)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a child span of the current request, or a null context without a recorded one."""
        return self._stage(name) if trace.get_current_span().is_recording() else nullcontext()

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        with self._tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False) as span:
            try:
                yield
            except BaseException as error:
                # Never the error text, which may contain personal data.
                code = error.code if isinstance(error, KithError) else type(error).__name__
                span.set_attribute("error.type", code)
                span.set_status(StatusCode.ERROR)
                raise

    def here(self) -> object | None:
        """Return the current span if it is sampled."""
        span = trace.get_current_span()
        return span if span.is_recording() else None

    def batch(self, network: str, items: int, askers: Mapping[object, float], ran_s: float) -> None:
        """Record a batch that has just ended; ``askers``: the spans that waited for it, with seconds waited."""
        if not askers:
            return
        end = time.time_ns()
        begun = end - int(ran_s * 1e9)
        waited = {cast(Span, span): int(seconds * 1e9) for span, seconds in askers.items()}
        links = [Link(span.get_span_context()) for span in waited]
        about = {"kith.network": network}
        batch = self._batches.start_span(
            f"batch {network}", Context(), attributes={**about, "kith.items": items}, links=links, start_time=begun
        )
        batch.end(end)
        for span, waited_ns in waited.items():
            within = trace.set_span_in_context(span)
            self._tracer.start_span("wait", within, attributes=about, start_time=begun - waited_ns).end(begun)
            self._tracer.start_span(
                "run", within, attributes=about, links=[Link(batch.get_span_context())], start_time=begun
            ).end(end)

    def close(self) -> None:
        """Send the remaining spans; blocks for CLOSE_TIMEOUT_S at most."""
        late = threading.Timer(CLOSE_TIMEOUT_S, self._exporter.shutdown)
        late.start()
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        late.cancel()


class RequestSpan:
    """Span of a request. ``trace_id``: 32 hexadecimal digits."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def answered(self, name: str, route: str, status: int, code: str | None, request_id: str) -> None:
        """Record the answer. ``name``: method and route; ``code``: error code, if the request failed."""
        span = self._span
        span.update_name(name)
        span.set_attributes({"http.route": route, "http.response.status_code": status, "kith.request_id": request_id})
        if code is not None:
            span.set_attribute("error.type", code)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
