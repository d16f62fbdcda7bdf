"""What is stored of people is sealed by their gallery's key: subjects, labels, vectors, crops, remembered answers, and
what jobs say of items. A job says who asked for it."""

import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import context, op

from service.gallery import rows
from service.gallery.labels import labels_of
from service.gallery.tables import galleries, subjects
from service.security.sealing import Seal, vector_purpose

revision = "0007"
down_revision = "0006"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TIME = sa.DateTime(timezone=True)
ROWS_AT_ONCE = 4096


def upgrade() -> None:
    vault, connection = context.config.attributes["vault"], op.get_bind()
    if connection.dialect.name == "sqlite" and not rows.highest(connection, galleries):
        op.execute("PRAGMA user_version = 7")  # nothing was ever written in clear (service.gallery.database)
    pks = connection.execute(sa.text("SELECT pk FROM galleries")).scalars().all()
    seals = {pk: vault.of(connection, pk) for pk in pks}
    _subjects(connection, seals)
    _vectors(connection, seals)
    _crops(connection, seals)
    _idempotency(connection, seals)
    _jobs(connection, seals)


def _blocks(connection: sa.Connection, table: str, columns: str, joined: str = "") -> Iterator[list[sa.Row[Any]]]:
    """Rows of a table by its key, some at once."""
    after = 0
    query = (
        f"SELECT {table}.pk, {columns} FROM {table} {joined} "  # noqa: S608 - names that stand below
        f"WHERE {table}.pk > :after ORDER BY {table}.pk LIMIT {ROWS_AT_ONCE}"
    )
    while found := list(connection.execute(sa.text(query), {"after": after}).all()):
        yield found
        after = found[-1].pk


def _read(value: Any) -> Any:
    """JSON as a driver gives it: SQLite's as text."""
    return json.loads(value) if isinstance(value, str) else value


def _subjects(connection: sa.Connection, seals: dict[int, Seal]) -> None:
    highest = rows.highest(connection, subjects)
    op.add_column("subjects", sa.Column("sealed", sa.LargeBinary))
    op.execute("DELETE FROM labels")
    told = sa.text("UPDATE subjects SET id = :lookup, sealed = :sealed WHERE pk = :pk")
    labelled = sa.text("INSERT INTO labels (gallery_pk, label, subject_pk) VALUES (:gallery, :label, :pk)")
    for block in _blocks(connection, "subjects", "gallery_pk, id, name, metadata, tags"):
        sealed, borne = [], []
        for row in block:
            seal, metadata, tags = seals[row.gallery_pk], _read(row.metadata), _read(row.tags)
            about = {"id": row.id, "name": row.name, "metadata": metadata, "tags": tags}
            lookup = seal.pseudonym("subject", row.id)
            sealed.append({"pk": row.pk, "lookup": lookup, "sealed": seal.close_json(about, "subject")})
            borne += [
                {"gallery": row.gallery_pk, "label": label, "pk": row.pk}
                for label in sorted(labels_of(seal, tags, metadata))
            ]
        connection.execute(told, sealed)
        if borne:
            connection.execute(labelled, borne)
    with op.batch_alter_table("subjects", table_kwargs={"sqlite_autoincrement": True}) as table:
        table.alter_column("id", new_column_name="lookup", existing_type=sa.String(128), type_=sa.String(32))
        table.alter_column("sealed", existing_type=sa.LargeBinary, nullable=False)
        for column in ("name", "metadata", "tags"):
            table.drop_column(column)
    rows.raise_highest(connection, subjects, highest)


def _vectors(connection: sa.Connection, seals: dict[int, Seal]) -> None:
    op.execute("DELETE FROM vectors WHERE template_pk NOT IN (SELECT pk FROM templates)")  # nobody's, in clear
    told = sa.text("UPDATE vectors SET vector = :vector WHERE template_pk = :pk AND generation = :generation")
    columns, joined = "gallery_pk, generation, vector", "JOIN vectors ON template_pk = pk"
    # By templates, each with all its generations, so that none is left at a block's end.
    last = 0
    while first := _next_templates(connection, last):
        last = first[-1]
        query = f"SELECT pk, {columns} FROM templates {joined} WHERE pk BETWEEN :first AND :last"  # noqa: S608
        found = connection.execute(sa.text(query), {"first": first[0], "last": last}).all()
        sealed = [
            {
                "pk": row.pk,
                "generation": row.generation,
                # One below zero is set aside: it is of generation -1 - g, and stays sealed as that one's.
                "vector": seals[row.gallery_pk].close(
                    bytes(row.vector), vector_purpose(max(row.generation, -1 - row.generation))
                ),
            }
            for row in found
        ]
        if sealed:
            connection.execute(told, sealed)


def _next_templates(connection: sa.Connection, after: int) -> list[int]:
    query = f"SELECT pk FROM templates WHERE pk > :after ORDER BY pk LIMIT {ROWS_AT_ONCE}"  # noqa: S608
    return list(connection.execute(sa.text(query), {"after": after}).scalars())


def _crops(connection: sa.Connection, seals: dict[int, Seal]) -> None:
    op.rename_table("crops", "crops_before")
    made = op.create_table(
        "crops",
        sa.Column("template_pk", KEY, sa.ForeignKey("templates.pk", ondelete="CASCADE"), primary_key=True),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
    )
    joined = "JOIN crops_before ON template_pk = pk"
    for block in _blocks(connection, "templates", "gallery_pk, image, landmarks", joined):
        sealed = [
            {
                "template_pk": row.pk,
                "sealed": seals[row.gallery_pk].close(
                    json.dumps(_read(row.landmarks)).encode() + b"\n" + bytes(row.image), "crop"
                ),
            }
            for row in block
        ]
        connection.execute(made.insert(), sealed)
    op.drop_table("crops_before")


def _idempotency(connection: sa.Connection, seals: dict[int, Seal]) -> None:
    query = "SELECT gallery_pk, key, subject_pk, digest, response, created_at FROM idempotency"
    typed = sa.text(query).columns(created_at=TIME)
    found = [row for row in connection.execute(typed).all() if row.gallery_pk in seals]
    op.drop_table("idempotency")
    made = op.create_table(
        "idempotency",
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), primary_key=True),
        sa.Column("lookup", sa.String(32), primary_key=True),
        sa.Column("subject_pk", KEY, sa.ForeignKey("subjects.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
    )
    sealed = []
    for row in found:
        seal = seals[row.gallery_pk]
        lookup, digest = seal.pseudonym("idempotency key", row.key), seal.pseudonym("request digest", row.digest)
        keys = {"gallery_pk": row.gallery_pk, "subject_pk": row.subject_pk, "created_at": row.created_at}
        sealed.append(
            {**keys, "lookup": lookup, "digest": digest, "sealed": seal.close(row.response.encode(), "answer")}
        )
    if sealed:
        connection.execute(made.insert(), sealed)


def _jobs(connection: sa.Connection, seals: dict[int, Seal]) -> None:
    problems = connection.execute(sa.text("SELECT pk, gallery_pk, problem FROM jobs")).all()
    op.execute("ALTER TABLE jobs DROP COLUMN problem")
    op.add_column("jobs", sa.Column("problem", sa.LargeBinary))
    op.add_column("jobs", sa.Column("actor", sa.String(64), nullable=False, server_default="service"))
    for pk, gallery, problem in problems:
        if (said := _read(problem)) is not None:
            sealed = seals[gallery].close_json(said, "job problem")
            told = sa.text("UPDATE jobs SET problem = :sealed WHERE pk = :pk")
            connection.execute(told, {"pk": pk, "sealed": sealed})
    op.rename_table("job_items", "job_items_before")
    made = op.create_table(
        "job_items",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("job_pk", KEY, sa.ForeignKey("jobs.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("lookup", sa.String(32), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("failed", sa.Boolean, nullable=False),
        sa.Column("subject", sa.String(32)),
        sa.Column("at", TIME, nullable=False),
        sa.UniqueConstraint("job_pk", "lookup"),
        sqlite_autoincrement=True,
    )
    op.create_index("job_items_by_job", "job_items", ["job_pk", "pk"])
    op.create_index("job_items_by_subject", "job_items", ["subject"])
    for pk, gallery, _ in problems:
        for block in _items(connection, pk):
            connection.execute(made.insert(), [_item(seals[gallery], pk, row) for row in block])
    op.drop_table("job_items_before")


def _items(connection: sa.Connection, job: int) -> Iterator[list[sa.Row[Any]]]:
    query = sa.text(
        "SELECT item, problem, at FROM job_items_before WHERE job_pk = :job AND item > :after "  # noqa: S608
        f"ORDER BY item LIMIT {ROWS_AT_ONCE}"
    ).columns(at=TIME)
    after = ""
    while block := list(connection.execute(query, {"job": job, "after": after}).all()):
        yield block
        after = block[-1].item


def _item(seal: Seal, job: int, row: sa.Row[Any]) -> dict[str, Any]:
    problem = _read(row.problem)
    return {
        "job_pk": job,
        "lookup": seal.pseudonym("job item", row.item),
        "sealed": seal.close_json({"item": row.item, "problem": problem}, "job item"),
        "failed": problem is not None,
        "at": row.at,
    }


def downgrade() -> None:
    raise RuntimeError("what is sealed is not written in clear again: restore a backup")
