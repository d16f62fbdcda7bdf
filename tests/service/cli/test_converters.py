"""Databases of other services are converted to files that a real server accepts."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

from kith import Kith
from kith.wire.identifiers import normalize_id
from models.pack.manifest import ModelPack
from service.cli.converters import compreface, deepface
from service.cli.converters.output import PersonPhoto, SubjectIds, photo_suffix, write_archive
from service.cli.main import app
from service.core.errors import ForeignFileError
from tests.conftest import jpeg
from tests.postgres import Postgres

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


def run(*arguments: str | Path, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def enroll(server: str, gallery: str, archive: Path) -> Any:
    return run("enroll", archive, "--gallery", gallery, "--url", server, "--largest-face")


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
@pytest.mark.parametrize("packed", [False, True])
def test_compreface_photos_are_enrolled(
    dump: Path, packed: bool, tmp_path: Path, server: str, kith: Kith, gallery: str, astronaut: NDArray[Any]
) -> None:
    if packed:
        (tmp_path / "dump.sql.gz").write_bytes(gzip.compress(dump.read_bytes()))
        dump = tmp_path / "dump.sql.gz"
    archive = tmp_path / "staff.zip"
    done = run("convert", "compreface", dump, archive, "--collection", "Staff")
    assert (done["people_count"], done["photo_count"]) == (2, 2)
    assert done["left"] == ["1 embeddings without a photo", "1 people without a photo"]
    assert done["renamed"] == {"Tom\tH/\\anks\n": "Tom H--anks"}
    assert archive.stat().st_mode & 0o777 == 0o600
    report = enroll(server, gallery, archive)
    assert (report["enrolled_count"], report["refused"]) == (2, [])
    assert {subject.id for subject in kith.subjects(gallery)} == {"eileen", "Tom H--anks"}
    (found,) = kith.identify(gallery, jpeg(astronaut, 60), risk={"threshold": 0.9}).results
    assert (found.outcome, found.subject) == ("identified", "eileen")


@needs_pg_dump
def test_compreface_needs_a_collection_if_there_are_several(dump: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", "compreface", str(dump), str(tmp_path / "o.zip")])
    assert done.exit_code == 2
    assert "Staff, Guests" in done.output
    assert not (tmp_path / "o.zip").exists()
    assert run("convert", "compreface", dump, tmp_path / "o.zip", "--collection", GUESTS)["people_count"] == 1


@needs_pg_dump
def test_unreadable_compreface_dumps_are_rejected(dump: Path, tmp_path: Path) -> None:
    whole = dump.read_bytes()
    cases: dict[str, tuple[bytes, str]] = {
        "custom": (b"PGDMP\x01", "custom format"),
        "empty": (b"", "has no rows"),
        "others": (b"COPY public.other (id) FROM stdin;\n1\n\\.\n", "'subject'"),
        "cut": (whole[: whole.index(b"COPY public.subject") + 120], "truncated"),
        "wide": (whole.replace(b"(id, api_key, subject_name)", b"(id, api_key)"), "as many values as columns"),
        "gzip": (gzip.compress(whole)[:-100], "cannot be read"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ForeignFileError, match=message):
            compreface.read_collections(path)
    lacking = tmp_path / "lacking"
    lacking.write_bytes(whole.replace(b"COPY public.img (", b"COPY public.other ("))
    (staff,) = (each for each in compreface.read_collections(lacking) if each.name == "Staff")
    with pytest.raises(ForeignFileError, match="lacks 2 photos"):
        list(compreface.read_photos(lacking, staff, SubjectIds()))
    broken = tmp_path / "broken"
    broken.write_bytes(whole.replace(b"\\\\xffd8", b"\\\\xffdz"))
    with pytest.raises(ForeignFileError, match="'img' cannot be read"):
        list(compreface.read_photos(broken, staff, SubjectIds()))


def test_deepface_photos_are_enrolled(
    tmp_path: Path, server: str, kith: Kith, gallery: str, astronaut: NDArray[Any], actor: NDArray[Any]
) -> None:
    """The pickle holds paths of a folder on another system."""
    folder = tmp_path / "my_db"
    (folder / "eileen").mkdir(parents=True)
    (folder / "eileen" / "1.jpg").write_bytes(jpeg(astronaut))
    (folder / "Tom Hanks.jpg").write_bytes(jpeg(actor))
    area = {"target_x": np.int64(3), "target_y": 4, "target_w": 5, "target_h": 6}
    representations = [
        {"identity": name, "hash": "9a0b", "embedding": vector, **area}
        for name, vector in (
            ("C:\\dbs\\my_db\\eileen\\1.jpg", [0.1, 0.2]),
            ("C:\\dbs\\my_db\\Tom Hanks.jpg", np.ones(4)),
            ("C:\\dbs\\my_db\\Tom Hanks.jpg", None),
            ("C:\\dbs\\my_db\\gone\\2.jpg", [0.1, 0.2]),
        )
    ]
    path = folder / "ds_model_vggface_detector_opencv_aligned_normalization_base_expand_0.pkl"
    path.write_bytes(pickle.dumps(representations))
    done = run("convert", "deepface", path, tmp_path / "people.zip")
    assert (done["people_count"], done["photo_count"]) == (2, 2)
    assert done["left"] == [f"C:\\dbs\\my_db\\gone\\2.jpg is not in {folder}"]
    report = enroll(server, gallery, tmp_path / "people.zip")
    assert (report["enrolled_count"], report["refused"]) == (2, [])
    assert {subject.id for subject in kith.subjects(gallery)} == {"eileen", "Tom Hanks"}


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))  # 3 is the minimum of Python 3
def test_deepface_pickles_of_every_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "representations_vgg_face.pkl"
    entries = [["a/1.jpg", np.arange(3.0)], ["a/1.jpg", [np.float32(1)]], ["b/2.jpg", None]]
    path.write_bytes(pickle.dumps(entries, protocol))
    assert deepface.read_paths(path) == ["a/1.jpg", "b/2.jpg"]


class _Calls:
    """Pickles to a function call."""

    def __init__(self, what: Callable[..., Any], *arguments: Any) -> None:
        self._called = what, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._called


@pytest.mark.parametrize(
    "what", [os.system, eval, open, getattr, np.load, np.fromfile, pickle.loads, subprocess.Popen, Path.write_text]
)
def test_a_pickle_cannot_call_functions(what: Callable[..., Any], tmp_path: Path) -> None:
    path, made = tmp_path / "hostile.pkl", tmp_path / "made"
    path.write_bytes(pickle.dumps([{"identity": _Calls(what, f"touch {made}")}]))
    with pytest.raises(ForeignFileError):
        deepface.read_paths(path)
    assert not made.exists()


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_a_known_error(tmp_path_factory: pytest.TempPathFactory, made_up: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "made-up.pkl"
    for content in (made_up, pickle.dumps(["x", made_up])[:-1] + made_up, b"\x80\x04]" + made_up):
        path.write_bytes(content)
        try:
            deepface.read_paths(path)
        except ForeignFileError:
            continue


def test_photos_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    (folder / "a").mkdir(parents=True)
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (folder / "a" / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (folder / "a" / "notes.txt").write_text("no photo")
    paths = ["../secret.jpg", str(tmp_path / "secret.jpg"), "db/a/link.jpg", "a/notes.txt", "a", "x" * 5000, "\0.jpg"]
    assert deepface.find_photos(paths, folder) == ({}, paths)


INSIGHTFACE = """
CREATE TABLE collections (id TEXT PRIMARY KEY, name TEXT, model_id TEXT, model_digest TEXT, embedding_dimension INTEGER,
                          preprocessing_version TEXT);
CREATE TABLE persons (collection_id TEXT, id TEXT, name TEXT, external_id TEXT, metadata_json TEXT,
                      PRIMARY KEY (collection_id, id));
CREATE TABLE face_samples (id TEXT PRIMARY KEY, collection_id TEXT, person_id TEXT, embedding BLOB,
                           detection_score REAL, created_at TEXT);
"""


@pytest.fixture
def collections(tmp_path: Path, pack: ModelPack, kith: Kith, astronaut: NDArray[Any]) -> Path:
    """Database of an InsightFace Server that serves the bundled pack."""
    sizes = {"recognizer": [112, 112], "detector": [640, 640]}
    identity = [
        {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "input_size": size,
            "input_mean": 127.5,
            "input_std": deviation,
            "preprocessing_version": version,
        }
        for path, size, deviation, version in (
            (pack.detection.path, sizes["detector"], 128.0, "insightface-scrfd-1"),
            (pack.recognition.path, sizes["recognizer"], 127.5, "arcface-1"),
        )
    ]
    digest = hashlib.sha256(json.dumps(identity, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
    (face,) = kith.embed(jpeg(astronaut)).images[0].faces
    vector = np.asarray(face.embedding, np.float32)
    path = tmp_path / "insightface server.db"
    connection = sqlite3.connect(path)
    connection.executescript(INSIGHTFACE)
    rows = [("staff", "Staff", pack.model_id, d, len(vector), "arcface-1") for d in (digest,)]
    rows.append(("old", "Old", "antelopev2", "0" * 64, 512, "arcface-1"))
    connection.executemany("INSERT INTO collections VALUES (?, ?, ?, ?, ?, ?)", rows)
    people = [("staff", "eileen", "Eileen Collins", "E-1", '{"room": 12}'), ("staff", "a/b", None, None, "{}")]
    connection.executemany("INSERT INTO persons VALUES (?, ?, ?, ?, ?)", people)
    sample = ("f1", "staff", "eileen", vector.tobytes(), 0.99, "2026-01-31T12:00:00.000Z")
    connection.execute("INSERT INTO face_samples VALUES (?, ?, ?, ?, ?, ?)", sample)
    connection.commit()
    connection.close()
    return path


def test_insightface_server_vectors_are_imported(
    collections: Path, tmp_path: Path, server: str, kith: Kith, gallery: str, astronaut: NDArray[Any]
) -> None:
    file = tmp_path / "staff.ndjson"
    done = run("convert", "insightface-server", collections, file, "--collection", "staff")
    assert (done["people_count"], done["photo_count"], done["renamed"]) == (2, 1, {"a/b": "a-b"})
    assert file.stat().st_mode & 0o777 == 0o600
    assert run("gallery", "import", gallery, file, "--url", server)["template_count"] == 1
    eileen = kith.subject(gallery, "eileen")
    assert (eileen.name, eileen.metadata) == ("Eileen Collins", {"room": 12, "external_id": "E-1"})
    (found,) = kith.identify(gallery, jpeg(astronaut), risk={"threshold": 0.9}).results
    assert (found.outcome, found.subject) == ("identified", "eileen")


def test_insightface_server_vectors_of_other_networks_are_rejected(collections: Path, tmp_path: Path) -> None:
    with pytest.raises(ForeignFileError, match="'antelopev2', whose networks are not those of"):
        run("convert", "insightface-server", collections, tmp_path / "o.ndjson", "--collection", "old")
    for content in (b"", b"not a database at all, but long enough to be looked at" * 10):
        (tmp_path / "other.db").write_bytes(content)
        with pytest.raises(ForeignFileError, match="not a database of InsightFace Server"):
            run("convert", "insightface-server", tmp_path / "other.db", tmp_path / "o.ndjson")
    assert not list(tmp_path.glob("o.ndjson*"))


@given(st.lists(st.text(), max_size=30))
def test_subject_ids_are_valid_and_unique(names: list[str]) -> None:
    ids = SubjectIds()
    mapping = {name: ids.id_for(name) for name in names}
    assert len(set(mapping.values())) == len(mapping)
    assert all(0 < len(subject) <= 128 and "/" not in subject and "\\" not in subject for subject in mapping.values())
    assert all(normalize_id(subject) == subject for subject in mapping.values())
    assert all(ids.id_for(name) == subject for name, subject in mapping.items())


def test_the_output_folder_must_exist(tmp_path: Path) -> None:
    (tmp_path / "ds.pkl").write_bytes(pickle.dumps([]))
    done = CliRunner().invoke(app, ["convert", "deepface", str(tmp_path / "ds.pkl"), str(tmp_path / "no" / "p.zip")])
    assert done.exit_code == 2
    assert "does not exist" in " ".join(done.output.replace("│", " ").split())


def test_photos_get_the_suffix_of_their_format(tmp_path: Path) -> None:
    assert photo_suffix(b"\x89PNG\r\n\x1a\n") == ".png"
    assert photo_suffix(b"\0\0\0\x18ftypheic\0\0\0\0heic") == ".heic"
    assert photo_suffix(b"RIFF....WAVE") == photo_suffix(b"?") == ".jpg"
    photos = [PersonPhoto("a", "1", b"GIF89a"), PersonPhoto("b", "2", b"II*\0")]
    assert write_archive(photos, tmp_path / "p.zip") == (2, 2)
    with zipfile.ZipFile(tmp_path / "p.zip") as archive:
        assert [Path(name).suffix for name in archive.namelist()] == [".gif", ".tiff", ".csv"]
        assert archive.read("manifest.csv").decode().splitlines()[1].endswith(",a,1")
