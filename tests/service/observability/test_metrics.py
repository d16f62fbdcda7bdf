"""Values of /metrics and /v1/status from a real server after real traffic; docs/observability.md documents them."""

from __future__ import annotations

import asyncio
import re
import time
import zipfile
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kith import Kith, KithClientError
from kith.wire.status import LagOut
from service.core.actor import Actor, acting_as
from service.core.errors import OverloadedError, RefusedError, StorageError, all_errors
from service.domain.gallery import GallerySettings, NewTemplate
from service.index.follower import Followers, in_process
from service.observability.metrics import Metrics
from service.operations import metrics_export, status
from service.operations.status import STALE_S, Readiness, RecentState, ServiceState, StateReader
from service.risk.drift import Decided, Watches
from service.server import embedded
from service.settings import load_settings
from service.storage.repositories.store import Store
from tests.conftest import jpeg
from tests.databases import open_database
from tests.service.observability.test_alerts import documented_metrics

Photo = NDArray[np.uint8]
PERSON = "tepeyollotl"


@pytest.fixture(scope="module")
def told(
    tmp_path_factory: pytest.TempPathFactory, astronaut: Photo, actor: Photo, nobody: Photo
) -> Iterator[tuple[str, str]]:
    """Metrics and status of a server after requests of each kind."""
    settings = load_settings(data_dir=tmp_path_factory.mktemp("told"), log_level="WARNING")
    with pytest.MonkeyPatch.context() as patch:
        for module in (status, metrics_export):
            patch.setattr(module, "MAX_GALLERIES", 2)
        with embedded(settings) as url, Kith(url) as kith:
            for name in ("first", "second", "third"):
                kith.create_gallery(name)
            photo = jpeg(astronaut)
            kith.enroll("first", PERSON, photo)
            for wrong in (jpeg(nobody), b"no photo"):
                with pytest.raises(KithClientError):
                    kith.enroll("first", PERSON, wrong)
            kith.identify("first", photo, jpeg(actor), b"no photo")
            kith.identify("second", photo)
            kith.identify("third", photo)
            kith.verify(photo, jpeg(actor))
            with zipfile.ZipFile(settings.data_dir / "archive.zip", "w") as archive:
                archive.writestr(f"{PERSON}/one.jpg", photo)
            kith.wait_for(kith.enroll_archive("second", settings.data_dir / "archive.zip").id)
            httpx.get(f"{url}/no/such/path/{PERSON}")
            httpx.request("TRACE", f"{url}/healthz")
            yield url, httpx.get(f"{url}/metrics").text


@pytest.fixture(scope="module")
def families(told: tuple[str, str]) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(told[1])}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    found = [
        each.value
        for family in families.values()
        for each in family.samples
        if each.name == sample and labels.items() <= each.labels.items()
    ]
    assert found, (sample, labels)
    return sum(found)


def test_requests_stages_and_batches(families: dict[str, Metric]) -> None:
    enrolling = {"route": "/v1/galleries/{gallery}/subjects/{subject}/templates", "method": "POST"}
    assert value(families, "kith_request_seconds_count", **enrolling, status="2xx") == 1
    assert value(families, "kith_request_seconds_count", **enrolling, status="4xx") == 2
    assert value(families, "kith_request_seconds_count", route="-") >= 1
    assert value(families, "kith_request_seconds_count", method="other") == 1
    assert value(families, "kith_requests_in_progress") == 1, "the scrape itself"
    for stage in ("read", "decode", "detect", "align", "embed", "follow", "search", "check", "write"):
        assert value(families, "kith_stage_seconds_count", stage=stage, lane="requests") > 0, stage
    assert value(families, "kith_stage_seconds_count", stage="decode", lane="background") == 1
    assert value(families, "kith_stage_seconds_count", stage="write", lane="requests") == 1
    buckets = [each for each in families["kith_stage_seconds"].samples if each.labels.get("le") == "+Inf"]
    assert len(buckets) < 30
    photos = value(families, "kith_photo_faces_count", lane="requests")
    detected = value(families, "kith_batch_items_sum", network="detector/" + pack(families)) - 1
    assert detected > photos and (detected - photos) % 4 == 0, "four other views of a photo without a confident face"
    assert value(families, "kith_batch_fill_ratio_count") == value(families, "kith_batch_seconds_count")
    assert 0 < value(families, "kith_batch_fill_ratio_sum") <= value(families, "kith_batch_fill_ratio_count")


def pack(families: dict[str, Metric]) -> str:
    (build,) = families["kith_build_info"].samples
    return build.labels["pack"]


def test_outcomes_refusals_and_scores(families: dict[str, Metric]) -> None:
    assert value(families, "kith_identify_total", gallery="first", outcome="identified") == 1
    assert value(families, "kith_identify_total", gallery="(others)", outcome="unknown") == 1, "the third of two"
    assert value(families, "kith_verify_total", outcome="different") == 1
    assert value(families, "kith_verify_total", outcome="same") == 0, "there before it happens"
    assert value(families, "kith_enroll_total", outcome="enrolled") == 2
    assert value(families, "kith_enroll_total", outcome="no_face") == 1
    assert value(families, "kith_problems_total", code="no_face") == 1
    assert value(families, "kith_problems_total", code="too_many_streams") == 0
    assert {each.labels["code"] for each in families["kith_problems"].samples} == {e.code for e in all_errors()}
    assert value(families, "kith_problems_total", code="not_found") == 1, "a path without a route"
    assert value(families, "kith_problems_total", code="method_not_allowed") == 1
    assert value(families, "kith_similarity_count", outcome="identified") == 1
    assert value(families, "kith_similarity_sum", outcome="identified") > 0.9
    assert value(families, "kith_face_quality_count", lane="requests") >= 7


def test_galleries_jobs_readiness_and_the_process(families: dict[str, Metric]) -> None:
    assert [value(families, f"kith_{what}") for what in ("galleries", "subjects", "templates")] == [3, 2, 2]
    assert value(families, "kith_gallery_templates", gallery="second") == 1
    named = {
        each.labels["gallery"] for family in families.values() for each in family.samples if "gallery" in each.labels
    }
    assert named == {"first", "second", "(others)"}
    assert value(families, "kith_jobs", state="succeeded") == 1
    assert value(families, "kith_jobs", state="failed") == 0
    assert value(families, "kith_index_lag_lines", gallery="first") == 0
    assert value(families, "kith_ready") == 1
    assert {each.labels["check"] for each in families["kith_check_ok"].samples} == {
        "devices",
        "database",
        "audit",
    }
    assert 0 < value(families, "kith_disk_free_bytes") < value(families, "kith_disk_size_bytes")


def test_an_index_that_has_yet_to_follow_lags(tmp_path: Path, rng: np.random.Generator) -> None:
    """What another process deleted is not reported any more."""
    with closing(Store(open_database(f"sqlite:///{tmp_path / 'kith.db'}"))) as store:
        followers, watches = Followers(in_process(store)), Watches({})
        look = StateReader(Readiness({}), store, followers, tmp_path, watches)
        gallery, _ = (store.galleries.create(name, "f", 8, GallerySettings()) for name in ("g", "goes"))
        for name in ("g", "goes"):
            watches.of(store.galleries.get(name).pk, name, "f").add([Decided("no_face")])
        assert look().index_lag == {}, "nobody searched it"
        assert watches.drifts().keys() == {"g", "goes"}
        with closing(Store(open_database(f"sqlite:///{tmp_path / 'kith.db'}"))) as another:
            another.galleries.delete("goes")
        followers.of(gallery).catch_up()
        assert look().index_lag == {"g": LagOut(line_count=0, seconds=0)}
        assert watches.drifts().keys() == {"g"}
        vector = rng.normal(size=8).astype(np.float32)
        store.templates.enroll(gallery, "somebody", [NewTemplate("0" * 32, vector, "embedding")], None)
        first, second = (lags["g"] for lags in (look().index_lag, look().index_lag) if lags is not None)
        assert (first.line_count, second.line_count) == (1, 1) and 0 == first.seconds < second.seconds
        followers.of(gallery).catch_up()
        assert look().index_lag == {"g": LagOut(line_count=0, seconds=0)}
        followers.close()


def test_each_metric_is_documented_and_there(families: dict[str, Metric]) -> None:
    documented = set(documented_metrics())
    told = set()
    for family in families.values():
        labels = frozenset(label for each in family.samples for label in each.labels if label != "le")
        told.add((f"{family.name}_total" if family.type == "counter" else family.name, family.type, labels))
    late = {name for name, *_ in documented if re.search("mated|mqtt_connected|refused|dropped|index_lag", name)}
    assert {each for each in documented if each[0] not in late} == {each for each in told if each[0] not in late}
    assert late <= {name for name, *_ in told}


def test_status_is_one_document_and_names_nobody(told: tuple[str, str]) -> None:
    assert PERSON not in told[1]
    status = httpx.get(f"{told[0]}/v1/status").json()
    assert status["ready"] is True
    assert [check["name"] for check in status["checks"]] == ["devices", "database", "audit"]
    assert {queue["network"].split("/")[0] for queue in status["queues"]} >= {"detector", "recognizer"}
    assert all(queue["batch_count"] > 0 for queue in status["queues"] if queue["network"] != "liveness")
    counts = status["drift"]["first"]["since_start_counts"]
    assert (counts["identified"], sum(counts.values())) == (1, 2)
    assert httpx.get(f"{told[0]}/v1/galleries/first").json()["drift"] == status["drift"]["first"]
    assert status["job_counts"]["succeeded"] == 1
    assert status["audit"]["lost_count"] == 0
    assert status["clock"]["ok"] is True
    assert status["uptime_s"] > 0


def test_a_look_that_hangs_is_not_waited_for_and_is_told_as_old() -> None:
    go, looks = Event(), []

    def look() -> ServiceState:
        looks.append(time.time())
        if len(looks) > 1:
            go.wait()
        return ServiceState(looked_at=datetime.now(UTC))

    samples = RecentState(look, fresh_s=0, timeout_s=0.01)
    while (first := samples.latest()).looked_at is None:
        assert first.stale and not first.ready
    assert samples.latest() is first is samples.latest()
    assert len(looks) == 2, "one at a time"
    go.set()
    while samples.latest() is first:
        pass


def test_what_was_seen_long_ago_says_no_more_that_all_is_well_whatever_the_clock_says() -> None:
    assert ServiceState(looked_at=datetime.fromtimestamp(0, UTC)).ready
    old = ServiceState(looked_at=datetime.now(UTC), at=time.monotonic() - STALE_S)
    assert old.stale
    assert not old.ready


def test_readiness_is_told_in_time_by_one_look_however_many_ask() -> None:
    go, looks = Event(), []

    def hang() -> None:
        looks.append(1)
        go.wait()

    async def main() -> None:
        ready = Readiness({"database": hang}, timeout_s=0.01)
        for each in await asyncio.gather(*(ready.check() for _ in range(100)), return_exceptions=True):
            assert isinstance(each, RefusedError)
            assert each.code == "readiness_unknown"
        assert len(looks) == 1
        go.set()
        while True:
            with suppress(RefusedError):
                await ready.check()
                return

    asyncio.run(main())


def test_a_check_that_fails_leaves_the_others() -> None:
    def fail() -> None:
        raise StorageError("away")

    found = Readiness({"database": fail, "audit": lambda: None}).look()
    assert [(check.name, check.ok, check.code) for check in found] == [
        ("database", False, "storage_unavailable"),
        ("audit", True, None),
    ]
    assert not ServiceState(checks=found).ready


def test_failed_stages_are_timed_in_the_lane_of_their_caller() -> None:
    metrics = Metrics()
    with pytest.raises(OverloadedError), acting_as(Actor("anonymous", "r")), metrics.stage("detect"):
        raise OverloadedError("full")
    with metrics.stage("detect"):
        pass
    for lane in ("background", "requests"):
        assert metrics.registry.get_sample_value("kith_stage_seconds_count", {"stage": "detect", "lane": lane}) == 1
