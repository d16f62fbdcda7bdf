"""A real server with the compatible API, and keys that are bound to one gallery each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from kith.wire.common import Scope
from service.security.api_keys import Rights
from service.settings import Settings
from service.storage.repositories.api_keys import KeyStore
from tests.conftest import jpeg
from tests.databases import open_database
from tests.service.api.conftest import KEY, Guarded

CLIENT_SCOPES: tuple[Scope, ...] = ("identify", "read", "enroll", "vectors")


@dataclass(frozen=True)
class CompatServer:
    """``settings``: of the running service, whose database the tests add keys to."""

    url: str
    settings: Settings
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def create_gallery(self, **options: object) -> str:
        """Create an empty gallery and return its name."""
        name = f"collection-{next(self.numbers)}"
        with Kith(self.url, KEY) as kith:
            kith.create_gallery(name, **options)  # type: ignore[arg-type]
        return name

    def create_key(self, *galleries: str, scopes: Sequence[Scope] = CLIENT_SCOPES) -> str:
        """Return the token of a new key, for all galleries if none is given."""
        with closing(open_database(self.settings.sql_url)) as database:
            names = frozenset(galleries) if galleries else None
            return KeyStore(database).create("client", Rights(frozenset(scopes), names))[1]

    def client(self, token: str) -> httpx.Client:
        return httpx.Client(base_url=f"{self.url}/api/v1", headers={"x-api-key": token}, timeout=60)

    @property
    def host(self) -> str:
        return self.url.rpartition(":")[0]

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]


@pytest.fixture(scope="session")
def compat(guarded: Guarded) -> CompatServer:
    return CompatServer(guarded.url, guarded.settings)


@pytest.fixture(scope="session")
def photos(
    tmp_path_factory: pytest.TempPathFactory,
    astronaut: NDArray[np.uint8],
    actor: NDArray[np.uint8],
    group: NDArray[np.uint8],
    nobody: NDArray[np.uint8],
) -> Path:
    """Folder with JPEG files named after the fixtures of tests/conftest.py, and a second photo of the astronaut."""
    folder = tmp_path_factory.mktemp("photos")
    arrays = {
        "astronaut": astronaut,
        "astronaut2": np.ascontiguousarray(astronaut[:, ::-1]),
        "actor": actor,
        "group": group,
        "nobody": nobody,
    }
    for name, array in arrays.items():
        (folder / f"{name}.jpg").write_bytes(jpeg(array))
    return folder
