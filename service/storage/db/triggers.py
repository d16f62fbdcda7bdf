"""Triggers that keep a gallery's counts and change log, whichever statement or cascade changes its rows.

With a subject goes its name in jobs, whose items stay done; with a template the stored answers about its subject.
Outsiders (``subjects.owner_pk``) count neither as subjects nor, with their one template, as templates. The subject may
be deleted first, so its row makes up for the template. The cascade reaches the rows of a deleted gallery after it.
"""
# ruff: noqa: S608 - the statements are constants

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.engine import Connection

_LINE: Final = "INSERT INTO changes (gallery_pk, template_pk, subject_pk)"
# The index reads both subjects again.
_MOVED: Final = (
    f"{_LINE} VALUES (old.gallery_pk, old.pk, old.subject_pk), (new.gallery_pk, new.pk, new.subject_pk); "
    "UPDATE galleries SET template_count = template_count + CASE pk WHEN new.gallery_pk THEN 1 ELSE -1 END "
    "WHERE pk IN (old.gallery_pk, new.gallery_pk) AND old.gallery_pk <> new.gallery_pk;"
)
SQLITE: Final = {
    "subjects_added": "AFTER INSERT ON subjects BEGIN "
    "UPDATE galleries SET subject_count = subject_count + (new.owner_pk IS NULL), "
    "template_count = template_count - (new.owner_pk IS NOT NULL) WHERE pk = new.gallery_pk; END",
    "subjects_removed": "AFTER DELETE ON subjects BEGIN "
    "UPDATE galleries SET subject_count = subject_count - (old.owner_pk IS NULL), "
    "template_count = template_count + (old.owner_pk IS NOT NULL) WHERE pk = old.gallery_pk; "
    "UPDATE job_items SET sealed = NULL, subject = NULL WHERE subject = old.lookup; END",
    "templates_added": "AFTER INSERT ON templates BEGIN "
    "UPDATE galleries SET template_count = template_count + 1 WHERE pk = new.gallery_pk; END",
    # An index learns of a template by its vector, of each recognizer.
    "vectors_added": "AFTER INSERT ON vectors BEGIN "
    f"{_LINE} SELECT gallery_pk, pk, subject_pk FROM templates WHERE pk = new.template_pk; END",
    "templates_removed": "AFTER DELETE ON templates BEGIN "
    "UPDATE galleries SET template_count = template_count - 1 WHERE pk = old.gallery_pk; "
    f"{_LINE} SELECT pk, old.pk, old.subject_pk FROM galleries WHERE pk = old.gallery_pk; "
    "DELETE FROM idempotency WHERE subject_pk = old.subject_pk; END",
    "templates_moved": f"AFTER UPDATE OF subject_pk ON templates BEGIN {_MOVED} END",
}
"""Triggers of SQLite, by name, for each row."""
RESTORING: Final = "kith.restoring_rows"
"""PostgreSQL setting of a transaction that restores counts and change log as they were."""


def _counting(table: str, event: str, numbers: str, counts: str, line: str = "NULL;") -> list[str]:
    """Return a PostgreSQL trigger that runs once for all rows of a statement or COPY."""
    name, rows = f"{table}_{event}", "NEW" if event == "added" else "OLD"
    return [
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE one record; BEGIN "
        f"FOR one IN SELECT gallery_pk, {numbers} FROM changed GROUP BY gallery_pk LOOP "
        f"UPDATE galleries SET {counts} WHERE pk = one.gallery_pk; "
        f"IF FOUND THEN {line} END IF; END LOOP; RETURN NULL; END $$",
        f"CREATE TRIGGER {name} AFTER {'INSERT' if event == 'added' else 'DELETE'} ON {table} "
        f"REFERENCING {rows} TABLE AS changed FOR EACH STATEMENT "
        f"WHEN (current_setting('{RESTORING}', true) IS DISTINCT FROM 'on') EXECUTE FUNCTION {name}()",
    ]


_NAMES: Final = "UPDATE job_items SET sealed = NULL, subject = NULL WHERE subject IN (SELECT lookup FROM changed);"
_ANSWERS: Final = "DELETE FROM idempotency WHERE subject_pk IN (SELECT subject_pk FROM changed);"
_LINES: Final = f"{_LINE} SELECT gallery_pk, pk, subject_pk FROM changed WHERE gallery_pk = one.gallery_pk ORDER BY pk;"
_NUMBER: Final = "count(*) AS number"
_PEOPLE: Final = "count(*) - count(owner_pk) AS people, count(owner_pk) AS outsiders"
_ADDED: Final = "subject_count = subject_count + one.people, template_count = template_count - one.outsiders"
_REMOVED: Final = "subject_count = subject_count - one.people, template_count = template_count + one.outsiders"
POSTGRESQL: Final = [
    *_counting("subjects", "added", _PEOPLE, _ADDED),
    *_counting("subjects", "removed", _PEOPLE, _REMOVED, _NAMES),
    *_counting("templates", "added", _NUMBER, "template_count = template_count + one.number"),
    *_counting("templates", "removed", _NUMBER, "template_count = template_count - one.number", f"{_LINES} {_ANSWERS}"),
    "CREATE FUNCTION vectors_added() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    f"{_LINE} SELECT gallery_pk, pk, subject_pk FROM templates JOIN changed ON template_pk = pk ORDER BY pk; "
    "RETURN NULL; END $$",
    "CREATE TRIGGER vectors_added AFTER INSERT ON vectors REFERENCING NEW TABLE AS changed FOR EACH STATEMENT "
    f"WHEN (current_setting('{RESTORING}', true) IS DISTINCT FROM 'on') EXECUTE FUNCTION vectors_added()",
    f"CREATE FUNCTION templates_moved() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {_MOVED} RETURN NULL; END $$",
    "CREATE TRIGGER templates_moved AFTER UPDATE OF subject_pk ON templates "
    "FOR EACH ROW EXECUTE FUNCTION templates_moved()",
]


def create_triggers(connection: Connection) -> None:
    """Create the triggers of a new database."""
    if connection.dialect.name == "sqlite":
        statements = [f"CREATE TRIGGER {name} {body}" for name, body in SQLITE.items()]
    else:
        statements = POSTGRESQL
    for statement in statements:
        connection.exec_driver_sql(statement)


@contextmanager
def triggers_off(connection: Connection) -> Iterator[None]:
    """Let this transaction restore rows with their counts and change log, until the block ends."""
    if connection.dialect.name == "sqlite":
        for name in SQLITE:
            connection.exec_driver_sql(f"DROP TRIGGER {name}")
        yield
        create_triggers(connection)
        return
    # A setting of the transaction: the account that restores need not own the tables.
    connection.exec_driver_sql(f"SELECT set_config('{RESTORING}', 'on', true)")
    yield
    connection.exec_driver_sql(f"SELECT set_config('{RESTORING}', 'off', true)")
