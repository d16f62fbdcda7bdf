"""Databases of earlier releases open, with all their contents."""

from __future__ import annotations

import shutil
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from service.domain.gallery import SubjectFilter
from service.index.follower import Followers, in_process
from service.security.master_keys import GivenKeys, MasterKeys
from service.storage.audit.chain import examine
from service.storage.audit.log import PURPOSE
from service.storage.audit.reader import trail_of
from service.storage.db.engine import open_database
from service.storage.db.tables import audit, metadata
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.store import Store
from tests.released_database import (
    KEY_ID,
    MASTER_KEY,
    RELEASED,
    SUBJECTS,
    TEMPLATES_PER_SUBJECT,
    TOKEN,
    subject_vectors,
)


def test_a_database_of_0_2_0_opens_and_is_searched(tmp_path: Path) -> None:
    shutil.copy(RELEASED, tmp_path / "kith.db")
    url = f"sqlite:///{tmp_path / 'kith.db'}"
    with closing(open_database(url, MasterKeys(GivenKeys(MASTER_KEY, "the test")))) as database:
        with database.engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        store = Store(database)
        gallery = store.galleries.get("g")
        stored = store.subjects.list_page(gallery, None, 9, SubjectFilter())
        assert {s.id: (s.name, s.metadata, s.tags) for s in stored} == SUBJECTS
        assert [s.template_count for s in stored] == [TEMPLATES_PER_SUBJECT] * len(SUBJECTS)
        follower = Followers(in_process(store)).catch_up_blocking(gallery)
        for number, subject in enumerate(stored):
            hits, _ = follower.search(subject_vectors(number), 1)
            assert [hit.subject_pk for (hit,) in hits] == [subject.pk] * TEMPLATES_PER_SUBJECT
        (engineer,) = store.subjects.list_page(gallery, None, 9, SubjectFilter(tags=("engine",)))
        assert engineer.id == "ada"

        key = KeyStore(database).ring().known(TOKEN)
        assert key is not None and (key.id, key.state(datetime.now(UTC))) == (KEY_ID, "active")

        with database.read() as connection:
            assert connection.execute(sa.select(sa.func.count()).select_from(audit)).scalar_one() >= len(SUBJECTS)
            secret = database.vault.secret(connection, PURPOSE)
        with trail_of(url) as trail:
            assert examine(trail.lines, trail.heads, secret, trail.galleries).faults == []
