"""Databases as the tests and benches open them: with one master key, which servers that they start are told, too."""

from __future__ import annotations

from service.gallery import database
from service.gallery.database import Database
from service.security.master import LocalKey, MasterKeys

TEXT = "00" * 31 + "07"
ENVIRONMENT = {"KITH_MASTER_KEY": TEXT}
MASTER = MasterKeys(LocalKey.of_text(TEXT))


def open_database(url: str) -> Database:
    return database.open_database(url, MASTER)
