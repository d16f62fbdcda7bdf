"""Recent probes that are unlike the gallery raise the thresholds of their caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from kith import Kith
from models.risk.probe_shift import MIN_PROBES
from models.runtime.network import Float
from service.domain.gallery import Gallery, GallerySettings, Keys
from service.index.follower import MemoryFollower, SubjectsFollower, TemplatesFollower
from service.risk.probe_windows import (
    MAX_AGE_S,
    MAX_PROBES_AT_ONCE,
    MAX_WINDOWS,
    SAMPLED,
    WINDOW_PROBES,
    ProbeWindows,
)
from service.risk.search import MAX_INLINE_FLOATS
from service.security.sealing import Seal, new_key
from service.server import embedded
from service.settings import load_settings
from tests.service.risk.test_gallery_risks import enroll, people

OPERATOR = "o" * 32
UNLIKE = "probes_unlike_gallery"
PEOPLE = 60


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(6)


def dark(rng: np.random.Generator, count: int) -> Float:
    """Unit vectors that resemble everyone more, as those of dark photos do."""
    return people(rng, count, 0.6)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("probes")
    with embedded(load_settings(data_dir=folder, log_level="WARNING", api_key=OPERATOR)) as url:
        with Kith(url, OPERATOR) as kith:
            kith.create_gallery("staff", risk={"fpir": 0.01})
            enroll(kith, "staff", people(np.random.default_rng(5), PEOPLE))
            kith.calibrate("staff")
        yield url


@pytest.fixture
def operator(url: str) -> Iterator[Kith]:
    with Kith(url, OPERATOR) as kith:
        yield kith


@pytest.fixture
def key(url: str, operator: Kith) -> Iterator[Callable[..., Kith]]:
    """Clients with keys of their own."""
    with ExitStack() as stack:
        yield lambda *scopes: stack.enter_context(Kith(url, operator.create_key("camera", scopes).token))


def searched(kith: Kith, vectors: Float) -> list[float]:
    """Return the threshold of each search."""
    return [result.threshold or 0 for result in kith.identify("staff", embeddings=list(vectors)).results]


def metric(url: str) -> str:
    text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {OPERATOR}"}).text
    return next(line for line in text.splitlines() if line.startswith('kith_probes_unlike_gallery{gallery="staff"}'))


def test_probes_like_everyone_raise_thresholds_until_they_stop(
    url: str, operator: Kith, key: Callable[..., Kith], rng: np.random.Generator
) -> None:
    camera, door = key("identify", "vectors"), key("identify", "vectors")
    usual, odd = people(rng, 1), dark(rng, MAX_PROBES_AT_ONCE)
    (before,) = searched(camera, usual)
    report = operator.risk("staff")
    assert UNLIKE not in report.warnings
    assert report.probes_threshold is None

    camera.identify("staff", embeddings=list(odd))
    (found,) = camera.identify("staff", embeddings=list(usual)).results
    assert found.threshold is not None
    assert before + 0.01 < found.threshold < (before + 1) / 2 + 0.1
    assert UNLIKE in found.reasons
    report = operator.risk("staff")
    assert UNLIKE in report.warnings
    assert report.probes_threshold is not None
    assert report.probes_threshold > report.threshold + 0.01
    assert metric(url).endswith(" 1.0")
    assert searched(door, usual) == [before], "another key's thresholds stay"

    for _ in range(SAMPLED * WINDOW_PROBES // MAX_PROBES_AT_ONCE + SAMPLED):
        camera.identify("staff", embeddings=list(people(rng, MAX_PROBES_AT_ONCE)))
    assert searched(camera, usual) == [before]
    assert UNLIKE not in operator.risk("staff").warnings
    assert metric(url).endswith(" 0.0")


def test_an_alarm_probability_agrees_with_the_raised_threshold(
    key: Callable[..., Kith], rng: np.random.Generator
) -> None:
    camera = key("identify", "vectors")
    camera.identify("staff", embeddings=list(dark(rng, MAX_PROBES_AT_ONCE)))
    for result in camera.identify("staff", embeddings=list(dark(rng, MAX_PROBES_AT_ONCE))).results:
        assert result.similarity is not None and result.threshold is not None
        assert result.false_alarm_probability is not None
        if abs(result.similarity - result.threshold) > 1e-3:
            assert (result.false_alarm_probability <= 0.01) == (result.similarity >= result.threshold)


def test_a_fixed_threshold_stays(key: Callable[..., Kith], rng: np.random.Generator) -> None:
    camera = key("identify", "vectors")
    camera.identify("staff", embeddings=list(dark(rng, MAX_PROBES_AT_ONCE)))
    (found,) = camera.identify("staff", embeddings=list(dark(rng, 1)), risk={"threshold": 0.7}).results
    assert (found.threshold, found.reasons) == (0.7, [])


@pytest.mark.parametrize(
    ("count", "floats", "may_be_behind", "thread"),
    [
        (1, MAX_INLINE_FLOATS, False, "kith-server"),
        (1, MAX_INLINE_FLOATS, True, "blocking"),
        (1, 0, False, "blocking"),
        (20, MAX_INLINE_FLOATS, False, "blocking"),
    ],
)
def test_only_a_short_search_in_memory_runs_on_the_event_loop(
    key: Callable[..., Kith],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    floats: int,
    may_be_behind: bool,
    thread: str,
) -> None:
    """A follower that other nodes move, as Milvus's, waits for a server, for the panel of the recent probes too."""
    searches: list[tuple[bool, str]] = []
    for follower in (SubjectsFollower, TemplatesFollower):
        search = follower.search

        def recorded(
            self: MemoryFollower, probes: Float, k: int, among: Keys | None = None, search: Any = search
        ) -> Any:
            searches.append((among is not None, threading.current_thread().name))
            return search(self, probes, k, among)

        monkeypatch.setattr(follower, "search", recorded)
    monkeypatch.setattr("service.risk.search.MAX_INLINE_FLOATS", floats)
    if may_be_behind:
        monkeypatch.setattr(MemoryFollower, "is_at", lambda *_: False)
    camera = key("identify", "vectors")
    camera.identify("staff", embeddings=list(people(rng, 1)))  # reads the gallery and its risk
    searches.clear()
    camera.identify("staff", embeddings=list(people(rng, count)))
    assert [of_panel for of_panel, _ in searches] == [False, True]
    assert all(name.startswith(thread) for _, name in searches)


def gallery_of(pk: int) -> Gallery:
    return Gallery(pk, f"g{pk}", "f" * 32, 4, GallerySettings(), datetime.now(UTC), Seal(new_key()))


def test_a_window_needs_probes_and_expires_after_a_day() -> None:
    now = 0.0
    windows = ProbeWindows(lambda: now)
    gallery, rows = gallery_of(1), np.tile([0.5, 0.7], (MIN_PROBES - 1, 1))
    windows.add(gallery, "key:a", rows)
    assert windows.levels(gallery, "key:a") is None
    windows.add(gallery, "key:a", rows)
    assert windows.levels(gallery, "key:b") is None
    levels = windows.levels(gallery, "key:a")
    assert levels is not None
    assert levels.means == pytest.approx((0.5, 0.7))
    assert windows.levels_of_callers(gallery) == [levels]
    now = MAX_AGE_S
    assert windows.levels(gallery, "key:a") is None
    assert windows.levels_of_callers(gallery) == []


def test_windows_are_bounded_and_forgotten_with_their_gallery() -> None:
    windows = ProbeWindows()
    rows = np.tile([0.5, 0.7], (MIN_PROBES, 1))
    for pk in range(MAX_WINDOWS + 1):
        windows.add(gallery_of(pk), "key:a", rows)
    assert windows.levels(gallery_of(0), "key:a") is None
    assert windows.levels(gallery_of(1), "key:a") is not None
    windows.forget(gallery_of(1))
    assert windows.levels(gallery_of(1), "key:a") is None
    assert len(windows.unlike_galleries()) == MAX_WINDOWS - 1


def test_a_full_window_samples_requests() -> None:
    windows, gallery = ProbeWindows(), gallery_of(1)
    assert windows.wanted(gallery, "key:a", 1000) == MAX_PROBES_AT_ONCE
    windows.add(gallery, "key:a", np.zeros((WINDOW_PROBES, 2)))
    assert [windows.wanted(gallery, "key:a", 5) for _ in range(2 * SAMPLED)].count(5) == 2
