"""Test databases: one master key for all, also for the servers that tests and benches start."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from service.domain.gallery import Gallery
from service.security.master_keys import GivenKeys, MasterKeys
from service.storage.db import engine as database
from service.storage.db.engine import Database
from service.storage.repositories.generations import FILL, GenerationStore
from service.storage.repositories.jobs import Job, JobStore
from service.storage.repositories.store import Store

TEXT = "00" * 31 + "07"
ENVIRONMENT = {"KITH_MASTER_KEY": TEXT}
MASTER = MasterKeys(GivenKeys(TEXT, "the tests"))
ON_BOTH = pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
"""Marks a storage test of what SQLite and PostgreSQL do in different ways: locks, order of commits, types, cascades."""
ON_POSTGRESQL = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
"""Marks a storage test of what SQLite, with its one writer at a time, does not do."""


def open_database(url: str) -> Database:
    return database.open_database(url, MASTER)


def claimed(database: Database, gallery: Gallery, kind: str = "work") -> Job:
    """Queue a job of a gallery, and claim it."""
    jobs = JobStore(database)
    made = jobs.create(gallery, kind, {})
    job = jobs.claim("here", 60, lambda job: job.id == made.id)
    assert job is not None
    return job


def change_recognizer(database: Database, gallery: str, fingerprint: str, dimension: int) -> None:
    """Switch a gallery to another recognizer, which embeds none of its templates."""
    store, generations, jobs = Store(database), GenerationStore(database), JobStore(database)
    generations.start(store.galleries.get(gallery), fingerprint, dimension, "new", force=True)
    job = jobs.claim("here", 60, lambda job: job.kind == FILL and not job.cancel)
    now = store.galleries.get(gallery)
    assert job is not None and now.other is not None
    assert generations.switch(now.at_generation(now.other.number), job, lambda _: ({}, []), (), 0)
    jobs.finish(job, "succeeded")


def engine_of(url: str) -> sa.Engine:
    """Return a plain SQLAlchemy engine, which bypasses Kith."""
    return sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
