"""Databases as earlier releases left them."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime

import alembic.command
import alembic.config
import numpy as np
import sqlalchemy as sa

from models.network import Float
from models.recognition import unit
from service.gallery.database import MIGRATIONS
from service.gallery.vault import Vault
from tests.databases import MASTER

DIMENSION = 32


def engine_of(url: str) -> sa.Engine:
    return sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))


def at_revision(url: str, revision: str) -> sa.MetaData:
    """Empty tables, as they were."""
    engine, tables = engine_of(url), sa.MetaData()
    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes |= {"connection": connection, "vault": Vault(MASTER)}
        alembic.command.upgrade(config, revision)
        tables.reflect(connection)
    engine.dispose()
    return tables


def at_revision_0002(url: str, subjects: int, templates: int) -> dict[str, list[Float]]:
    """A gallery "g" of so many ``templates`` of each of its ``subjects``, without the last of each, which was deleted;
    every second subject bears the tag "even". Returns everybody's vectors."""
    rng = np.random.default_rng(2)
    tables = at_revision(url, "0002")
    engine, now = engine_of(url), datetime.now(UTC)
    with engine.begin() as connection:

        def insert(table: str, **values: object) -> int:
            result = connection.execute(tables.tables[table].insert().values(**values))
            assert result.inserted_primary_key is not None
            return int(result.inserted_primary_key[0])

        risk = {"kind": "fpir", "value": 0.001}
        settings = {"risk": risk, "fusion": "mean_top_k", "quality_gate": {}}
        gallery = insert(
            "galleries", name="g", fingerprint="f" * 32, dimension=DIMENSION, settings=settings, created_at=now
        )
        kept: dict[str, list[Float]] = {}
        for i in range(subjects):
            tags = ["even"] if i % 2 == 0 else []
            subject = insert(
                "subjects",
                gallery_pk=gallery,
                id=f"s{i}",
                metadata={"floor": i % 3},
                tags=tags,
                created_at=now,
                updated_at=now,
            )
            vectors = unit(rng.normal(size=(templates, DIMENSION))).astype("<f4")
            for vector in vectors:
                template = insert(
                    "templates",
                    id=uuid.uuid4().hex,
                    gallery_pk=gallery,
                    subject_pk=subject,
                    vector=vector.tobytes(),
                    kind="embedding",
                    created_at=now,
                )
                insert("changes", gallery_pk=gallery, template_pk=template, subject_pk=subject)
            connection.execute(tables.tables["templates"].delete().where(tables.tables["templates"].c.pk == template))
            insert("changes", gallery_pk=gallery, template_pk=template, subject_pk=subject)
            kept[f"s{i}"] = list(vectors[:-1])
        document = json.dumps({})
        insert("audit", at=now, event="threshold_moved", gallery_pk=gallery, gallery="g", details={})
        connection.execute(
            tables.tables["evidence"]
            .insert()
            .values(gallery_pk=gallery, sequence=1, fusion="mean_top_k", templates=1, document=document, derived_at=now)
        )
    engine.dispose()
    return kept


def revision_of(url: str) -> str:
    engine = engine_of(url)
    with engine.connect() as connection:
        found = str(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one())
    engine.dispose()
    return found
