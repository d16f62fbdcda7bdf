"""Databases as the tests and benches open them: with one master key, which servers that they start are told, too."""

from __future__ import annotations

from service.gallery import database
from service.gallery.database import Database
from service.security.master import GivenKeys, MasterKeys

TEXT = "00" * 31 + "07"
ENVIRONMENT = {"KITH_MASTER_KEY": TEXT, "KITH_MAX_EMBEDDINGS": "1000", "KITH_EMBEDDING_RATE": "1000000"}
"""Tests and benches send more embeddings than a server takes by default (tests/service/test_probes.py)."""
MASTER = MasterKeys(GivenKeys(TEXT, "the tests"))


def open_database(url: str) -> Database:
    return database.open_database(url, MASTER)
