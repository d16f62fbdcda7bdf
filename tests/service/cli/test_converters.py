"""Databases of other services are converted to files that a real server accepts."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kith import Kith
from kith.wire.identifiers import normalize_id
from service.cli.converters import compreface
from service.cli.converters.output import SubjectIds
from tests.conftest import jpeg
from tests.postgres import Postgres
from tests.refusals import raises_code
from tests.service.cli.conftest import Program

COMPREFACE = """
CREATE TABLE model (id bigint PRIMARY KEY, name varchar(50), guid varchar(36), api_key varchar(36), type char(1));
CREATE TABLE subject (id uuid PRIMARY KEY, api_key varchar(36), subject_name varchar(255),
                      UNIQUE (api_key, subject_name));
CREATE TABLE img (id uuid PRIMARY KEY, content bytea NOT NULL);
CREATE TABLE embedding (id uuid PRIMARY KEY, subject_id uuid REFERENCES subject ON DELETE CASCADE,
                        embedding float8[] NOT NULL, calculator varchar(255) NOT NULL, img_id uuid REFERENCES img);
"""
"""Schema after CompreFace's migrations."""
STAFF, GUESTS = "00000000-0000-0000-0000-000000000002", "00000000-0000-0000-0000-000000000009"


def photo_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012}"


@pytest.fixture
def dump(postgres: Postgres, tmp_path: Path, astronaut: NDArray[Any], actor: NDArray[Any]) -> Path:
    """Dump with two collections. One subject's name holds a tab, a newline and slashes."""
    url = postgres.create(f"compreface_{os.urandom(4).hex()}")
    subjects = {1: (STAFF, "eileen"), 2: (STAFF, "Tom\tH/\\anks\n"), 3: (GUESTS, "guest"), 4: (STAFF, "lost")}
    with psycopg.connect(url) as connection:
        connection.execute(COMPREFACE)
        for number, (name, key) in enumerate({"Staff": STAFF, "Guests": GUESTS}.items()):
            connection.execute("INSERT INTO model VALUES (%s, %s, %s, %s, 'R')", (number, name, key, key))
        for number, (key, name) in subjects.items():
            connection.execute("INSERT INTO subject VALUES (%s, %s, %s)", (photo_id(number), key, name))
        for number, photo in enumerate((jpeg(astronaut), jpeg(actor), jpeg(actor, 50), None), start=1):
            if photo is not None:
                connection.execute("INSERT INTO img VALUES (%s, %s)", (photo_id(number), photo))
            row = (photo_id(number), photo_id(number), [0.5] * 4, "facenet.Calculator", photo and photo_id(number))
            connection.execute("INSERT INTO embedding VALUES (%s, %s, %s, %s, %s)", row)
    path = tmp_path / "dump.sql"
    path.write_bytes(subprocess.run(["pg_dump", url], check=True, capture_output=True, timeout=60).stdout)
    return path


needs_pg_dump = pytest.mark.skipif(shutil.which("pg_dump") is None, reason="pg_dump is not installed")


@needs_pg_dump
def test_compreface_photos_are_enrolled(
    dump: Path, run: Program, kith: Kith, gallery: str, astronaut: NDArray[Any]
) -> None:
    (packed := run.folder / "dump.sql.gz").write_bytes(gzip.compress(dump.read_bytes()))
    convert, staff = ("convert", "compreface", dump), ("--collection", "Staff", "--json")
    run(*convert, "staff.zip", status=2)
    assert "Staff, Guests" in run.stderr
    assert not (run.folder / "staff.zip").exists()
    assert json.loads(run(*convert, "guests.zip", "--collection", GUESTS, "--json"))["people_count"] == 1
    done = json.loads(run("convert", "compreface", packed, "staff.zip", *staff))
    assert (done["people_count"], done["photo_count"]) == (2, 2)
    assert done["left"] == ["1 embeddings without a photo", "1 people without a photo"]
    assert done["renamed"] == {"Tom\tH/\\anks\n": "Tom H--anks"}
    assert (run.folder / "staff.zip").stat().st_mode & 0o777 == 0o600
    report = json.loads(run("enroll", "staff.zip", "-g", gallery, "--largest-face", "--json"))
    assert (report["enrolled_count"], report["refused"]) == (2, [])
    assert {subject.id for subject in kith.subjects(gallery)} == {"eileen", "Tom H--anks"}
    (found,) = kith.identify(gallery, jpeg(astronaut, 60), risk={"threshold": 0.9}).results
    assert (found.outcome, found.subject) == ("identified", "eileen")


@needs_pg_dump
def test_unreadable_compreface_dumps_are_rejected(dump: Path, tmp_path: Path) -> None:
    whole = dump.read_bytes()
    cases: dict[str, tuple[bytes, str]] = {
        "custom": (b"PGDMP\x01", "custom format"),
        "empty": (b"", "has no rows"),
        "others": (b"COPY public.other (id) FROM stdin;\n1\n\\.\n", "'subject'"),
        "cut": (whole[: whole.index(b"COPY public.subject") + 120], "truncated"),
        "wide": (whole.replace(b"(id, api_key, subject_name)", b"(id, api_key)"), "cannot be read"),
        "gzip": (gzip.compress(whole)[:-100], "cannot be read"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with raises_code("foreign_file", match=message):
            compreface.read_collections(path)
    lacking = tmp_path / "lacking"
    lacking.write_bytes(whole.replace(b"COPY public.img (", b"COPY public.other ("))
    (staff,) = (each for each in compreface.read_collections(lacking) if each.name == "Staff")
    with raises_code("foreign_file", match="lacks 2 photos"):
        list(compreface.read_photos(lacking, staff, SubjectIds()))
    broken = tmp_path / "broken"
    broken.write_bytes(whole.replace(b"\\\\xffd8", b"\\\\xffdz"))
    with raises_code("foreign_file", match="'img' cannot be read"):
        list(compreface.read_photos(broken, staff, SubjectIds()))


@given(st.lists(st.text(), max_size=30))
@example(["", "..", "\u200d"])
def test_subject_ids_are_valid_and_unique(names: list[str]) -> None:
    ids = SubjectIds()
    mapping = {name: ids.id_for(name) for name in names}
    assert len(set(mapping.values())) == len(mapping)
    assert all(0 < len(subject) <= 128 and "/" not in subject and "\\" not in subject for subject in mapping.values())
    assert all(normalize_id(subject) == subject for subject in mapping.values())
    assert all(ids.id_for(name) == subject for name, subject in mapping.items())
