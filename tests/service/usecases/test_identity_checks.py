"""Concurrent enrollments are checked against each other, in one process and in several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kith import Kith, KithClientError
from service.server import embedded
from service.settings import load_settings
from tests.conftest import is_eventually
from tests.databases import ON_BOTH
from tests.postgres import DatabaseUrl

AT_ONCE = 8


@pytest.fixture
def urls(database_url: DatabaseUrl, tmp_path: Path) -> Iterator[list[str]]:
    """URLs of two servers on one database."""
    settings = load_settings(data_dir=tmp_path, database_url=database_url(), log_level="ERROR")
    with embedded(settings) as one, embedded(settings) as other:
        yield [one, other]


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


@ON_BOTH
def test_enrollments_at_once_are_checked_against_each_other(urls: list[str], rng: np.random.Generator) -> None:
    with ExitStack() as stack:
        kiths = [stack.enter_context(Kith(urls[n % len(urls)], attempts=1)) for n in range(AT_ONCE)]
        dimension = kiths[0].model().dimension
        axes, face = np.eye(dimension, dtype=np.float32), rng.normal(size=dimension)
        for gallery in ("names", "mixed", "apart", "new", "repeated"):
            kiths[0].create_gallery(gallery)
        # One face under many names, and different people under one name.
        names = at_once(lambda n: kiths[n].enroll("names", f"s{n}", embeddings=[face]))
        assert names == {"enrolled": 1, "duplicate_subject": AT_ONCE - 1}
        mixed = at_once(lambda n: kiths[n].enroll("mixed", "ada", embeddings=[axes[n]], allow_duplicate=True))
        assert mixed == {"enrolled": 1, "inconsistent_template": AT_ONCE - 1}
        # Each request stores one of two vectors; checks that are repeated report its refusal once.
        apart = at_once(lambda n: kiths[n].enroll("apart", f"s{n}", embeddings=[axes[n], axes[n + AT_ONCE]]))
        assert (apart, kiths[0].gallery("apart").template_count) == ({"enrolled": AT_ONCE}, AT_ONCE)

        def reported() -> int:
            return sum(line.details["count"] for line in kiths[0].audit("apart", event="enrollment_refused"))

        is_eventually(lambda: reported() >= AT_ONCE)
        assert reported() == AT_ONCE
        new: dict[str, Any] = {"embeddings": [axes[0]], "only_new": True}
        created = at_once(lambda n: kiths[n].enroll("new", "ada", **new))
        assert created == {"enrolled": 1, "subject_exists": AT_ONCE - 1}
        # A retry does not conflict with its first attempt.
        repeated = at_once(lambda n: kiths[n].enroll("repeated", "ada", **new, idempotency_key="k"))
        assert (repeated, kiths[0].gallery("repeated").template_count) == ({"enrolled": AT_ONCE}, 1)
        assert kiths[0].enroll("repeated", "ada", **new, idempotency_key="k").enrolled_count == 1
