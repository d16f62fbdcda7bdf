"""Exports can be imported into any database without changes. Refused items have a reason and do not stop the import."""

from __future__ import annotations

import base64
import gzip
import sqlite3
import threading
import tracemalloc
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx2 as httpx
import hypothesis
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kith import Kith, KithClientError
from kith.options import GalleryOptions, QualityGateOptions
from kith.wire.galleries import GallerySettingsIn
from kith.wire.transfer import GalleryFileHeader, ImportOut
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.cli.main import app
from service.domain.gallery import Crop, Gallery, GallerySettings, NewTemplate, SubjectFilter
from service.domain.gallery_items import FileRow
from service.operations.transfers import MAX_EXPORTS, THREADS
from service.settings import Settings
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.store import Store
from service.storage.transfer import ndjson
from service.storage.transfer.importing import Import, export
from tests.databases import ON_BOTH, open_database
from tests.postgres import DatabaseUrl

DIMENSION = 8
FINGERPRINT = "f" * 32
HEADER = GalleryFileHeader(FINGERPRINT, DIMENSION)


class Place:
    """Database with one gallery."""

    def __init__(self, url: str) -> None:
        self.database = open_database(url)
        self.store, self.bulk = Store(self.database), BulkStore(self.database)
        self.gallery = self.another("g")

    def another(self, name: str, keep_crops: bool = False) -> Gallery:
        settings = GallerySettings(keep_crops=keep_crops)
        return self.store.galleries.create(name, FINGERPRINT, DIMENSION, settings)

    def take(self, file: bytes, gallery: Gallery | None = None) -> ImportOut:
        taking = Import(self.bulk, gallery or self.gallery, HEADER)
        lines = ndjson.Lines(HEADER)
        for start in range(0, len(file), 1000):
            for block in lines.feed(file[start : start + 1000]):
                taking.take(block)
        for block in lines.end():
            taking.take(block)
        return taking.report

    def file(self, name: str = "g", crops: bool = False) -> bytes:
        return b"".join(export(self.bulk, name, lambda _: {}, crops=crops))

    def contents(self, name: str = "g", crops: bool = False) -> list[Any]:
        """Return all contents except keys, in comparable form."""
        return [orjson.loads(line) for line in self.file(name, crops).splitlines()[1:]]


@pytest.fixture
def place(database_url: DatabaseUrl) -> Iterator[Place]:
    opened = Place(database_url())
    yield opened
    opened.store.close()


def vector(rng: np.random.Generator) -> Float:
    drawn: Float = l2_normalize(rng.normal(size=(1, DIMENSION)))[0]
    return drawn


def line(subject: str, given: Any = None, **fields: Any) -> bytes:
    if isinstance(given, np.ndarray):
        given = base64.b64encode(given.astype("<f4").tobytes()).decode()
    fields |= {"subject": subject} | ({} if given is None else {"embedding": given})
    return orjson.dumps(fields) + b"\n"


TEXT = st.text("aZ09 .-_\u00e9\u65e5\U0001f600'\"\\/", max_size=20).map(str.strip)
IDS = st.text("aZ09.-_\u00e9\u65e5\U0001f600", min_size=1, max_size=40).filter(lambda text: text not in (".", ".."))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
PEOPLE = st.dictionaries(
    IDS,
    st.tuples(
        st.none() | TEXT,
        st.dictionaries(TEXT, VALUES, max_size=4),
        st.lists(TEXT.filter(bool), max_size=4),
        st.integers(0, 3),
    ),
    max_size=6,
)


@ON_BOTH
@hypothesis.settings(max_examples=15)
@given(people=PEOPLE, seed=st.integers(0, 1000))
def test_an_export_imported_elsewhere_gives_the_same_gallery(
    place: Place, tmp_path: Path, people: dict[str, tuple[Any, ...]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    elsewhere = Place(f"sqlite:///{tmp_path / uuid.uuid4().hex}.db")
    name = uuid.uuid4().hex
    origin, crop = place.another(name, keep_crops=True), Crop(b"RIFF....WEBP\0\xff", ((1.5, 2.0),) * 5)
    for subject, (called, metadata, tags, count) in people.items():
        place.store.subjects.put(origin, subject, called, metadata, tags)
        kinds = [("photo", {"score": 0.25, "yaw": -0.5}, 0.875, crop), ("embedding", None, None)]
        new = [NewTemplate(uuid.uuid4().hex, vector(rng), *kinds[i % 2]) for i in range(count)]  # type: ignore[arg-type]
        place.store.templates.enroll(origin, subject, new, None)
    file, contents = place.file(name, crops=True), {crops: place.contents(name, crops) for crops in (True, False)}
    assert not any("crop" in item for item in contents[False])
    for there, keep in ((elsewhere, True), (place, False)):
        copy = there.another(uuid.uuid4().hex, keep)
        report = there.take(file, copy)
        assert not report.refused_count
        again = there.take(file, copy)
        assert (again.subject_count, again.template_count, again.refused_count) == (0, 0, 0)
        assert again.present_count == report.template_count
        assert there.contents(copy.name, crops=True) == contents[keep]
        assert (found := there.store.galleries.get(copy.name)).subjects == len(people)
        assert found.templates == sum(count for *_, count in people.values())
        for _, metadata, tags, _ in people.values():
            chosen = SubjectFilter(tuple(tags), tuple(metadata.items()))
            expected = {s.id for s in place.store.subjects.list_page(origin, None, 100, chosen)}
            assert {s.id for s in there.store.subjects.list_page(copy, None, 100, chosen)} == expected
    elsewhere.store.close()


def test_a_derived_id_is_a_keyed_hash(place: Place, rng: np.random.Generator) -> None:
    """Receipts keep the id for good. Without the gallery's key it must not reveal which subject was imported."""
    one, other = vector(rng), vector(rng)
    elsewhere = place.another("of-another-key")
    for gallery in (place.gallery, elsewhere):
        assert place.take(line("a", one), gallery=gallery).template_count == 1
    (here,), (there,) = (place.store.templates.list_page(gallery, "a") for gallery in (place.gallery, elsewhere))
    assert here.id != there.id
    report = place.take(line("a", one.tolist()) + line("a", other) + line("b", one))
    assert (report.template_count, report.present_count, report.refused_count) == (2, 1, 0)
    begun = place.store.galleries.get("g")
    place.store.templates.delete(begun, "a", here.id)
    assert [r.error.code for r in place.take(line("a", one), gallery=begun).refusals] == ["subject_erased"]
    assert place.take(line("a", one), gallery=place.store.galleries.get("g")).template_count == 1


def test_future_times_become_now(place: Place, rng: np.random.Generator) -> None:
    """Otherwise an item could escape retention."""
    late, early = "2199-12-31T23:59:59Z", "2020-02-03T04:05:06.000007+02:00"
    times = ("created_at", "subject_created_at", "subject_updated_at")
    people = [line(name, vector(rng), **dict.fromkeys(times, at)) for name, at in (("late", late), ("early", early))]
    before = datetime.now(UTC)
    assert place.take(b"".join(people)).template_count == 2
    stored = {one["subject"]: one for one in place.contents()}
    for name in times:
        assert before <= datetime.fromisoformat(stored["late"][name]) <= datetime.now(UTC)
        assert datetime.fromisoformat(stored["early"][name]) == datetime.fromisoformat(early)


@ON_BOTH
def test_each_item_fails_alone_with_its_line_and_reason(place: Place, rng: np.random.Generator) -> None:
    good, other, taken = vector(rng), vector(rng), uuid.uuid4().hex
    times = ("created_at", "subject_created_at", "subject_updated_at")
    too_early = ("0999-01-01T00:00:00Z", "0001-01-01T00:00:00+23:00", "1969-12-31T23:59:59Z")
    too_late = ("2200-01-01T00:00:00Z", "9999-12-31T23:59:59-23:00")
    invalid: list[dict[str, Any]] = [
        {"template": "XYZ"},
        {"kind": "video"},
        {"nmae": "misspelled"},
        {"tags": ["x" * 65]},
        {"metadata": [1]},
        *({"name": name} for name in ("null \0", "\x1b[2J", "turned \u202e")),
        {"tags": ["two\nlines"]},
        {"created_at": "yesterday"},
        *({name: at} for name in times for at in too_early + too_late),
        *({"quality": {"score": score}} for score in (1e300, -0.1, None, "high")),
        {"crop": "UklGRg==", "landmarks": [[1]]},
    ]
    file: list[tuple[bytes, str | None]] = [
        (ndjson.header_line(HEADER), None),
        (line("a", good, template=taken), None),
        (b"{not json\n", "item_invalid"),
        (b"\n", None),
        (line("a/b", good), "item_invalid"),
        *((line("a", wrong), "embedding_invalid") for wrong in ([1.0] * 7, "AAAA", [0.0] * 8, "???")),
        (line("b", good, template=taken), "template_conflict"),
        (line("a", other, template=taken), "template_conflict"),
        *((line("a", other, **fields), "item_invalid") for fields in invalid),
        (line("a", np.full(8, np.nan)), "embedding_invalid"),
        (line("a", None, template=uuid.uuid4().hex), "embedding_invalid"),
        (b'{"subject": 7}\n', "item_invalid"),
        (line("last", 7 * other, created_at="1970-01-01T00:00:00Z", quality={"score": 1}), None),
    ]
    report = place.take(b"".join(text for text, _ in file))
    refused = {number: code for number, (_, code) in enumerate(file, start=1) if code is not None}
    assert {r.item: r.error.code for r in report.refusals} == refused
    details = {r.item: r.error.detail for r in report.refusals}
    assert "embedding has 7 numbers" in details[6]
    assert "embedding: 3 bytes are not float32 numbers of 4 bytes" in details[7]
    assert (report.subject_count, report.template_count, report.refused_count) == (2, 2, len(refused))
    assert [s.id for s in place.store.subjects.list_page(place.gallery, None, 10, SubjectFilter())] == ["a", "last"]
    assert np.allclose(place.store.templates.vectors(place.gallery, "last")[0], other, atol=1e-6)  # normalized
    later = place.take(line("b", good, template=taken) + line("a", other, template=taken))
    assert [r.error.code for r in later.refusals] == ["template_conflict"] * 2


def test_a_subject_has_the_first_fields_that_the_file_gives(place: Place, rng: np.random.Generator) -> None:
    """An export has the subject's fields only on its first item, which may be refused, or end a block."""
    taken, about = uuid.uuid4().hex, {"name": "Ada", "metadata": {"room": 1}, "tags": ["x"]}
    since = {"subject_created_at": "2001-01-01T00:00:00Z", "subject_updated_at": "2002-01-01T00:00:00Z"}
    place.take(line("other", vector(rng), template=taken))
    wrong = {
        "length": line("length", [1.0] * 7, **about, **since),
        "zero": line("zero", [0.0] * 8, **about, **since),
        "quality": line("quality", vector(rng), quality=[], **about, **since),
        "conflict": line("conflict", vector(rng), template=taken, **about, **since),
    }
    wrong["block"] = b"".join(line("many", vector(rng)) for _ in range(8191)) + line(
        "block", [0.0] * 8, **about, **since
    )
    for subject, refused in wrong.items():
        report = place.take(refused + line(subject, vector(rng)) + line(subject, vector(rng), name="Later"))
        assert (report.refused_count, report.template_count) == (1, refused.count(b"\n") + 1)
        found = place.store.subjects.get(place.gallery, subject)
        assert (found.name, found.metadata, found.tags) == ("Ada", {"room": 1}, ["x"])
        assert (found.created_at.year, found.updated_at.year) == (2001, 2002)
    of_many = ["tags" in item for item in place.contents() if item["subject"] == "many"]  # in two blocks of an export
    assert of_many == [True] + [False] * 8190
    # An item with an invalid name is refused as a whole. A subject that exists keeps its fields.
    place.take(line("b", vector(rng), name=7, tags=["y"]) + line("b", vector(rng), name="Bob"))
    place.take(line("b", vector(rng), name="Other", metadata={"room": 2}, tags=["z"]))
    found = place.store.subjects.get(place.gallery, "b")
    assert (found.name, found.metadata, found.tags, found.template_count) == ("Bob", {}, [], 2)


def test_memory_does_not_grow_with_the_file(place: Place) -> None:
    long, lines = line("a", [1.0] * 8, metadata={"x": "y" * 5_000_000}), ndjson.Lines(HEADER)
    assert [len(block) for _ in range(30) for block in lines.feed(long)] == [13, 13]
    assert [len(block) for block in lines.end()] == [4]
    taking, held = Import(place.bulk, place.gallery, HEADER), list[int]()
    tracemalloc.start()
    for first in range(0, 6000, 500):
        rows = [line(f"s{n}", np.ones(8 - n % 2), name=f"Name {n}") for n in range(first, first + 500)]
        (block,) = [*(lines := ndjson.Lines(HEADER)).feed(b"".join(rows)), *lines.end()]
        taking.take(block)
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(held[5:]) - held[4] < 500_000, held  # 1,000 refusals are kept


@ON_BOTH
def test_an_export_is_a_snapshot_during_concurrent_writes(place: Place, rng: np.random.Generator) -> None:
    for subject in ("a", "c"):
        place.take(line(subject, vector(rng)) * 2)
    before = place.contents()
    pieces = export(place.bulk, "g", lambda _: {})
    header = orjson.loads(next(pieces))
    place.take(b"".join(line(subject, vector(rng)) for subject in "abcd"))
    place.store.subjects.delete(place.store.galleries.get("g"), "c")
    assert [orjson.loads(text) for piece in pieces for text in piece.splitlines()] == before
    assert header["template_count"] == len(before) == 2


# Over HTTP


def rest(
    kith: Kith, gallery: str, file: bytes, kind: str = "application/x-ndjson", coding: str = "", **params: Any
) -> httpx.Response:
    headers = {"Content-Type": kind} | ({"Content-Encoding": coding} if coding else {})
    url = str(kith._http.base_url).rstrip("/")
    return httpx.post(f"{url}/v1/galleries/{gallery}/import", content=file, headers=headers, params=params, timeout=300)


def header_of(kith: Kith, **fields: Any) -> bytes:
    model = kith.model()
    return ndjson.header_line(replace(GalleryFileHeader(model.recognizer, model.dimension), **fields))


def people(kith: Kith, count: int) -> bytes:
    rng = np.random.default_rng(2)
    vectors = l2_normalize(rng.normal(size=(count, kith.model().dimension)))
    return b"".join(line(f"s{i}", v) for i, v in enumerate(vectors))


def test_gzip_is_unpacked(kith: Kith, gallery: str) -> None:
    packed = gzip.compress(header_of(kith) + people(kith, 10))
    assert rest(kith, gallery, packed, coding="gzip").json()["template_count"] == 10
    twice = rest(kith, gallery, packed + packed, coding="gzip").json()
    assert twice["refused_count"] == 1, "a header instead of an item"
    short = rest(kith, gallery, packed[:-20], coding="gzip").json()
    assert (short["code"], short["report"]["template_count"]) == ("import_invalid", 0)
    assert rest(kith, gallery, b"not gzip", coding="gzip").json()["code"] == "import_invalid"


@pytest.mark.parametrize(
    ("file", "params", "code"),
    [
        (b"", {}, "import_invalid"),
        (b"not json", {}, "import_invalid"),
        (b'{"subject": "a"}', {}, "import_invalid"),
        (b'{"subject": "a"}', {"recognizer": "e" * 32}, "recognizer_mismatch"),
        (b'{"subject": "a"}', {"recognizer": "no"}, "invalid_request"),
        (b"x" * 11_000_000, {"recognizer": "e" * 32}, "import_invalid"),
        (b"PAR1", {"kind": "application/octet-stream"}, "unsupported_media_type"),
        ({"version": 2}, {}, "import_invalid"),
        ({"dimension": 9}, {}, "import_invalid"),
        ({"dimension": -8}, {}, "import_invalid"),
        ({"recognizer": None}, {}, "import_invalid"),
        ({"recognizer": "e" * 32}, {}, "recognizer_mismatch"),
        ({"embeddings": False}, {}, "import_invalid"),
        ({"template_count": "many"}, {}, "import_invalid"),
    ],
)
def test_a_refused_import_says_why(
    kith: Kith, gallery: str, file: bytes | dict[str, Any], params: dict[str, str], code: str
) -> None:
    if isinstance(file, dict):  # of the header
        file = orjson.dumps(orjson.loads(header_of(kith)) | file) + b"\n" + people(kith, 1)
    answer = rest(kith, gallery, file, **params)
    assert (answer.json()["code"], answer.status_code // 100) == (code, 4)
    assert b"many" not in file or "template_count is invalid" in answer.json()["detail"]
    assert kith.gallery(gallery).template_count == 0


def test_a_file_truncated_between_lines_is_reported(kith: Kith, gallery: str) -> None:
    first, *lines = people(kith, 5).splitlines(keepends=True)
    twice = orjson.dumps({**orjson.loads(first), "template": uuid.uuid4().hex}) + b"\n"
    rest(kith, gallery, header_of(kith) + b"".join([first, twice, *lines, line("nobody")]))
    whole = b"".join(kith.export_gallery(gallery)).splitlines(keepends=True)
    assert rest(kith, "again", b"".join(whole), create=True).json()["present_count"] == 0
    assert rest(kith, gallery, b"".join(whole)).json()["present_count"] == 6
    for end, templates, subjects in ((1, 0, 0), (4, 3, 2), (-1, 6, 5)):
        cut = rest(kith, f"cut{end}".replace("-", "_"), b"".join(whole[:end]), create=True).json()
        assert cut["code"] == "import_invalid"
        assert f"counts 6 templates of 6 subjects, it contains {templates} of {subjects}" in cut["detail"]
        assert (cut["report"]["template_count"], cut["report"]["subject_count"]) == (templates, subjects)
    # Refused items count as received.
    refused = b"".join([*whole[:3], b"not JSON\n", *whole[4:]])
    assert rest(kith, "refused", refused, create=True).json()["refused_count"] == 1
    unheaded = rest(kith, gallery, people(kith, 7), recognizer=kith.model().recognizer).json()
    assert (unheaded["template_count"], unheaded["refused_count"]) == (7 - 5, 0), "the first five are present"


def test_an_import_can_create_the_gallery(kith: Kith, gallery: str) -> None:
    gate = {**kith.gallery(gallery).quality_gate.model_dump(), "min_sharpness": 1.5}
    given: GalleryOptions = {
        "risk": {"fmr": 0.01},
        "quality_gate": cast(QualityGateOptions, gate),
        "review_factor": 3.0,
        "one_face_per_person": False,
        "index": "exact",
        "recall": 0.9,
        "keep_crops": True,
        "retention_days": 400,
        "remember_strangers_days": 30,
        "liveness": "off",
        "liveness_threshold": 0.75,
    }
    assert given.keys() == GallerySettingsIn.model_fields.keys()
    kith.update_gallery(gallery, **given)
    rest(kith, gallery, header_of(kith) + people(kith, 5))
    file = b"".join(kith.export_gallery(gallery))
    assert rest(kith, "copy", file).json()["code"] == "gallery_not_found"
    assert rest(kith, "copy", file, create=True).json()["template_count"] == 5
    assert kith.gallery("copy").model_dump(mode="json", include=set(given)) == given
    kith.delete_gallery("copy")
    with pytest.raises(KithClientError, match="gallery_not_found"):
        list(kith.export_gallery("copy"))
    stranger = ndjson.header_line(GalleryFileHeader("e" * 32, kith.model().dimension))
    assert rest(kith, "copy", stranger, create=True).json()["code"] == "recognizer_mismatch"
    with pytest.raises(KithClientError, match="gallery_not_found"):
        kith.gallery("copy")


def test_stalled_and_abandoned_exports_delay_only_exports(kith: Kith, server: str, gallery: str) -> None:
    """And an import may exceed the limit of a request."""
    file = header_of(kith) + people(kith, 4500)
    assert len(file) > 4_500_000
    assert rest(kith, gallery, file).json()["template_count"] == 4500
    for _ in range(MAX_EXPORTS + 1):
        pieces = kith.export_gallery(gallery)
        next(pieces)
        pieces.close()
    stalled = [kith.export_gallery(gallery) for _ in range(MAX_EXPORTS)]
    for pieces in stalled:
        next(pieces)
    for _ in range(20):
        assert kith.gallery(gallery).template_count == 4500
    with Kith(server, attempts=1) as once, pytest.raises(KithClientError, match="overloaded"):
        next(once.export_gallery(gallery))
    for pieces in stalled:
        pieces.close()
    without = b"".join(kith.export_gallery(gallery, embeddings=False)).splitlines()
    assert len(without) == 4501 and orjson.loads(without[0])["embeddings"] is False
    assert not any(b'"embedding":' in text for text in without)
    for _ in range(MAX_EXPORTS + 1):  # an export that cannot start releases its slot
        with pytest.raises(KithClientError, match="gallery_not_found"):
            next(kith.export_gallery("nobody"))


def test_imports_delay_no_other_requests(
    kith: Kith, gallery: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the database is locked for writing, imports wait in their own threads."""
    file, take, writing = header_of(kith) + people(kith, 10), Import.take, threading.Semaphore(0)

    def taking(self: Import, rows: list[FileRow]) -> None:
        writing.release()
        take(self, rows)

    monkeypatch.setattr(Import, "take", taking)
    with (
        closing(sqlite3.connect(settings.data_dir / "kith.db", isolation_level=None)) as other,
        ThreadPoolExecutor(16) as threads,
    ):
        other.execute("BEGIN IMMEDIATE")
        answers = [threads.submit(rest, kith, gallery, file) for _ in range(16)]
        for _ in range(THREADS):
            assert writing.acquire(timeout=60)
        assert kith.gallery(gallery).template_count == 0
        assert not any(answer.done() for answer in answers)
        other.execute("ROLLBACK")
        assert [answer.result().status_code for answer in answers] == [200] * 16
    assert kith.gallery(gallery).template_count == 10


def test_commands_export_and_import_a_gallery(kith: Kith, server: str, gallery: str, tmp_path: Path) -> None:
    rest(kith, gallery, header_of(kith) + people(kith, 7))
    file, run = str(tmp_path / "file.ndjson.gz"), CliRunner().invoke
    assert run(app, ["gallery", "export", gallery, file, "--url", server]).exit_code == 0
    done = run(app, ["gallery", "import", f"{gallery}-2", file, "--create", "--url", server, "--json"])
    assert done.exit_code == 0, done.output
    assert orjson.loads(done.stdout)["template_count"] == 7
    kith.delete_gallery(f"{gallery}-2")
    for command in ("import", "export"):
        refused = run(app, ["gallery", command, gallery, __file__, "--url", server])
        assert (refused.exit_code, "must end in .ndjson" in refused.stderr) == (2, True)
