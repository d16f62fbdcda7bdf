"""Concurrent enrollments are checked against each other, in one process and in several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from kith import Kith, KithClientError
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.domain.gallery import GallerySettings, IdempotentResponse, NewTemplate
from service.server import embedded
from service.settings import load_settings
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.postgres import DatabaseUrl

AT_ONCE = 12


@pytest.fixture(params=[1, 2])
def urls(request: pytest.FixtureRequest, database_url: DatabaseUrl, tmp_path: Path) -> Iterator[list[str]]:
    """URLs of one or two servers on one database."""
    with ExitStack() as stack:
        settings = load_settings(data_dir=tmp_path, database_url=database_url(), log_level="ERROR")
        yield [stack.enter_context(embedded(settings)) for _ in range(request.param)]


def at_once(enroll: Callable[[int], object]) -> Counter[str]:
    """Enroll AT_ONCE times at once, and count the outcomes."""

    def outcome(number: int) -> str:
        try:
            enroll(number)
        except KithClientError as error:
            return error.code
        return "enrolled"

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return Counter(threads.map(outcome, range(AT_ONCE)))


def clients(urls: list[str], stack: ExitStack) -> list[Kith]:
    return [stack.enter_context(Kith(urls[n % len(urls)], attempts=1)) for n in range(AT_ONCE)]


def person(rng: np.random.Generator, dimension: int) -> Float:
    return l2_normalize(rng.normal(size=dimension))


def test_one_face_under_many_names_at_once_is_enrolled_once(urls: list[str], rng: np.random.Generator) -> None:
    with ExitStack() as stack:
        kiths = clients(urls, stack)
        kiths[0].create_gallery("g")
        for _ in range(3):
            face = person(rng, kiths[0].model().dimension)

            def enroll(n: int, face: Float = face) -> object:
                return kiths[n].enroll("g", f"{face[0]}-{n}", embeddings=[face])

            seen = at_once(enroll)
            assert seen == {"enrolled": 1, "duplicate_subject": AT_ONCE - 1}


def test_different_people_under_one_name_at_once_are_not_mixed(urls: list[str], rng: np.random.Generator) -> None:
    with ExitStack() as stack:
        kiths = clients(urls, stack)
        kiths[0].create_gallery("g")
        faces = np.eye(kiths[0].model().dimension, dtype=np.float32)
        for subject in ("ada", "bob"):

            def enroll(n: int, subject: str = subject) -> object:
                return kiths[n].enroll("g", subject, embeddings=[faces[n]], allow_duplicate=True)

            seen = at_once(enroll)
            assert seen == {"enrolled": 1, "inconsistent_template": AT_ONCE - 1}


def test_different_people_under_their_names_at_once_are_all_enrolled(urls: list[str]) -> None:
    with ExitStack() as stack:
        kiths = clients(urls, stack)
        kiths[0].create_gallery("g")
        faces = np.eye(kiths[0].model().dimension, dtype=np.float32)
        assert at_once(lambda n: kiths[n].enroll("g", f"s{n}", embeddings=[faces[n]])) == {"enrolled": AT_ONCE}


def test_a_repeated_request_is_stored_once(urls: list[str], rng: np.random.Generator) -> None:
    with ExitStack() as stack:
        kiths = clients(urls, stack)
        kiths[0].create_gallery("g")
        face = person(rng, kiths[0].model().dimension)
        seen = at_once(lambda n: kiths[n].enroll("g", "ada", embeddings=[face], idempotency_key="k"))
        assert seen == {"enrolled": AT_ONCE}
        assert kiths[0].gallery("g").template_count == 1


def test_a_repeated_request_leaves_the_gallery_at_its_version(database_url: DatabaseUrl) -> None:
    """Another version would invalidate all caches of the gallery."""
    with closing(open_database(database_url())) as database:
        store = Store(database)
        gallery = store.galleries.create("g", "f" * 64, 4, GallerySettings())
        keyed = IdempotentResponse("key", "digest", "answer")
        new = NewTemplate("0" * 32, np.eye(4, dtype=np.float32)[0], "embedding")
        assert store.templates.enroll(gallery, "ada", [new], keyed) is None
        version = store.galleries.get("g").version
        assert store.templates.enroll(gallery, "ada", [new], keyed) == "answer"
        assert store.galleries.get("g").version == version
