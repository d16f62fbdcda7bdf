"""Database as Kith 0.2.0 wrote it, for the test that later releases open it.

`python -m tests.released_database` wrote the file. Never write the file of a release again.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.domain.gallery import GallerySettings, NewTemplate
from service.security.api_keys import Rights
from service.storage.repositories import api_keys
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.store import Store
from tests.databases import open_database

RELEASED: Final = Path(__file__).parent / "data" / "kith-0.2.0.sqlite"
MASTER_KEY: Final = "00" * 31 + "07"
KEY_ID: Final = "bc2b010ab0c3"
TOKEN: Final = "kith_bc2b010ab0c3_347d47a207e651607bfd42e7e381e57d75b1171f2f24dabf38dea533014a9612"  # noqa: S105
DIMENSION: Final = 16
SUBJECTS: Final = {"ada": ("Ada Lovelace", {"born": 1815}, ["engine"]), "grace": (None, {}, ["navy"])}
TEMPLATES_PER_SUBJECT: Final = 2


def subject_vectors(number: int) -> Float:
    """Return the (2, 16) vectors of the subject with this number."""
    return np.asarray(
        l2_normalize(np.random.default_rng(number).normal(size=(TEMPLATES_PER_SUBJECT, DIMENSION))), np.float32
    )


def write(path: Path) -> None:
    """Write a gallery "g" with two subjects, four templates, an API key and the audit lines of all that."""
    with closing(open_database(f"sqlite:///{path}")) as database:
        store = Store(database)
        gallery = store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings(fusion="max"))
        for number, (subject, about) in enumerate(SUBJECTS.items()):
            store.subjects.put(gallery, subject, *about)
            new = [
                NewTemplate(f"{number}{i}" * 16, vector, "embedding")
                for i, vector in enumerate(subject_vectors(number))
            ]
            store.templates.enroll(gallery, subject, new, None)
        setattr(api_keys, "new_token", lambda: (KEY_ID, TOKEN))  # noqa: B010 - not exported
        KeyStore(database).create("door", Rights(frozenset({"read"}), frozenset({"g"})))
    with closing(sqlite3.connect(path, isolation_level=None)) as file:  # small pages keep the file small
        for statement in ("PRAGMA journal_mode = DELETE", "PRAGMA page_size = 512", "VACUUM"):
            file.execute(statement)


if __name__ == "__main__":
    if RELEASED.exists():
        raise SystemExit(f"{RELEASED} exists: the database of a release is never written again")
    write(RELEASED)
