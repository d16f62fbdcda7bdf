"""A real server with the compatible API, and keys that are bound to one gallery each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from kith import Kith
from kith.wire.common import Scope
from tests.conftest import jpeg
from tests.service.api.conftest import KEY, Guarded

CLIENT_SCOPES: tuple[Scope, ...] = ("identify", "read", "enroll", "vectors")


@dataclass(frozen=True)
class CompatServer:
    guarded: Guarded
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def url(self) -> str:
        return self.guarded.url

    def create_gallery(self, **options: object) -> str:
        """Create an empty gallery and return its name."""
        name = f"collection-{next(self.numbers)}"
        with Kith(self.url, KEY) as kith:
            kith.create_gallery(name, **options)  # type: ignore[arg-type]
        return name

    def create_key(self, *galleries: str, scopes: Sequence[Scope] = CLIENT_SCOPES) -> str:
        return self.guarded.token(*scopes, galleries=galleries)

    def client(self, token: str) -> httpx.Client:
        return httpx.Client(base_url=f"{self.url}/api/v1", headers={"x-api-key": token}, timeout=60)


@pytest.fixture(scope="session")
def compat(guarded: Guarded) -> CompatServer:
    return CompatServer(guarded)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Folder with JPEG files named after the fixtures of tests/conftest.py, and a second photo of the astronaut."""
    folder = tmp_path_factory.mktemp("photos")
    arrays = {name: request.getfixturevalue(name) for name in ("astronaut", "actor", "group", "nobody")}
    arrays["astronaut2"] = np.ascontiguousarray(arrays["astronaut"][:, ::-1])
    for name, array in arrays.items():
        (folder / f"{name}.jpg").write_bytes(jpeg(array))
    return folder
