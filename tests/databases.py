"""Test databases: one master key for all, also for the servers that tests and benches start."""

from __future__ import annotations

import sqlalchemy as sa

from service.security.master_keys import GivenKeys, MasterKeys
from service.storage.db import engine as database
from service.storage.db.engine import Database

TEXT = "00" * 31 + "07"
ENVIRONMENT = {"KITH_MASTER_KEY": TEXT}
MASTER = MasterKeys(GivenKeys(TEXT, "the tests"))


def open_database(url: str) -> Database:
    return database.open_database(url, MASTER)


def engine_of(url: str) -> sa.Engine:
    """Return a plain SQLAlchemy engine, which bypasses Kith."""
    return sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
