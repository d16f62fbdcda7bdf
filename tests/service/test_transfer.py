"""What goes out comes in again, whatever it is and wherever to; what cannot come in says why, alone."""

from __future__ import annotations

import base64
import gzip
import io
import resource
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from models.recognition import unit
from models.runtime import Float
from service.cli import app
from service.client import Kith, KithClientError
from service.errors import ImportFileError, ItemError, RecogniserMismatchError, StorageError
from service.gallery import ndjson, parquet
from service.gallery.bulk import BulkStore
from service.gallery.check import open_check
from service.gallery.database import Database, open_engine
from service.gallery.follower import Followers
from service.gallery.fusion import Fusion
from service.gallery.importing import Format, Import, Report, export
from service.gallery.replicas import in_process
from service.gallery.store import Store
from service.gallery.subjects import Gallery, GallerySettings, NewTemplate, SubjectFilter
from service.gallery.transfer import Header, Items, check
from tests.postgres import DatabaseUrl

DIMENSION = 8
FINGERPRINT = "f" * 32
HEADER = Header(FINGERPRINT, DIMENSION)
FORMATS: tuple[Format, ...] = ("ndjson", "parquet")


class Place:
    """A database with one gallery."""

    def __init__(self, url: str, dimension: int = DIMENSION, fusion: Fusion = "max") -> None:
        database = Database(open_engine(url))
        self.store, self.bulk = Store(database), BulkStore(database)
        self._fusion, self._dimension = fusion, dimension
        self.gallery = self.another("g")

    def another(self, name: str) -> Gallery:
        return self.store.create_gallery(name, FINGERPRINT, self._dimension, GallerySettings(fusion=self._fusion))

    def take(self, file: bytes, kind: Format = "ndjson", gallery: Gallery | None = None, skip: int = 0) -> Report:
        taking = Import(self.bulk, gallery or self.gallery, skip)
        if kind == "parquet":
            reader = parquet.Reader(io.BytesIO(file))
            taking.accept(reader.header)
            taking.take_all(reader)
        else:
            lines = ndjson.Lines(HEADER)
            for start in range(0, len(file), 1000):
                taking.take_all(lines.feed(file[start : start + 1000]))
            taking.take_all(lines.end())
        return taking.report

    def file(self, kind: Format = "ndjson", name: str = "g") -> bytes:
        return b"".join(export(self.bulk, name, kind, lambda _: {}))

    def contents(self, name: str = "g") -> list[Any]:
        """Everything but keys, comparably."""
        return [orjson.loads(line) for line in self.file(name=name).splitlines()[1:]]


@pytest.fixture
def place(database_url: DatabaseUrl) -> Iterator[Place]:
    opened = Place(database_url())
    yield opened
    opened.store.close()


def vector(rng: np.random.Generator) -> Float:
    drawn: Float = unit(rng.normal(size=(1, DIMENSION)))[0]
    return drawn


def line(subject: str, given: Any = None, **fields: Any) -> bytes:
    if isinstance(given, np.ndarray):
        given = base64.b64encode(given.astype("<f4").tobytes()).decode()
    fields |= {"subject": subject} | ({} if given is None else {"embedding": given})
    return orjson.dumps(fields) + b"\n"


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
IDS = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/\\"), min_size=1, max_size=40).filter(
    lambda text: text not in (".", "..") and text.isprintable()
)
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


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(people=PEOPLE, seed=st.integers(0, 1000))
def test_an_export_imported_elsewhere_is_the_same_gallery(
    place: Place, tmp_path: Path, people: dict[str, tuple[Any, ...]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    elsewhere = Place(f"sqlite:///{tmp_path / uuid.uuid4().hex}.db")
    name = uuid.uuid4().hex
    origin = place.another(name)
    for subject, (called, metadata, tags, count) in people.items():
        place.store.put_subject(origin, subject, called, metadata, tags)
        kinds = [("photo", {"score": 0.25, "yaw": -0.5}, 0.875), ("embedding", None, None)]
        new = [NewTemplate(uuid.uuid4().hex, vector(rng), *kinds[i % 2]) for i in range(count)]  # type: ignore[arg-type]
        place.store.enrol(origin, subject, new, None)
    for kind in FORMATS:
        file = place.file(kind, name)
        for there in (elsewhere, place):
            copy = there.another(f"{kind}-{uuid.uuid4().hex}")
            report = there.take(file, kind, copy)
            assert not report.refused
            assert there.contents(copy.name) == place.contents(name)
            assert (found := there.store.gallery(copy.name)).subjects == len(people)
            assert found.templates == sum(count for *_, count in people.values())
            for _, metadata, tags, _ in people.values():
                chosen = SubjectFilter(tuple(tags), tuple(metadata.items()))
                expected = {s.id for s in place.store.list_subjects(origin, None, 100, chosen)}
                assert {s.id for s in there.store.list_subjects(copy, None, 100, chosen)} == expected
    elsewhere.store.close()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_repeated_import_stores_nothing(place: Place, rng: np.random.Generator, kind: Format) -> None:
    place.take(b"".join(line(f"s{i % 3}", vector(rng)) for i in range(10)))
    before, file = place.contents(), place.file(kind)
    report = place.take(file, kind)
    assert (report.templates, report.subjects, report.present, report.refused) == (0, 0, 10, 0)
    assert place.contents() == before
    assert place.store.gallery("g").templates == 10


def test_a_template_without_an_id_has_one_that_follows_from_what_it_is(place: Place, rng: np.random.Generator) -> None:
    one, other = vector(rng), vector(rng)
    report = place.take(line("a", one) + line("a", one) + line("b", one) + line("a", other))
    assert (report.templates, report.present) == (3, 1)
    again = place.another("again")
    assert place.take(line("a", one.tolist()), gallery=again).templates == 1
    assert {t.id for t in place.store.list_templates(again, "a")} < {
        t.id for t in place.store.list_templates(place.gallery, "a")
    }


@pytest.mark.parametrize("fusion", ["max", "quality_weighted"])
def test_followers_see_what_was_imported(database_url: DatabaseUrl, rng: np.random.Generator, fusion: Fusion) -> None:
    place = Place(database_url(), fusion=fusion)
    followers = Followers(in_process(place.store))
    one, other, third = (vector(rng) for _ in range(3))
    place.take(line("one", one))
    assert followers.of(place.gallery).search(one[None], 1)[1] == 1
    place.take(line("one", one) + line("other", other) + line("third", third))
    hits, compared = followers.of(place.gallery).search(other[None], 3)
    assert compared == 3
    assert place.store.subjects_by_pk([hits[0][0].subject_pk])[hits[0][0].subject_pk].id == "other"
    place.store.close()


def test_each_item_fails_alone_with_its_line_and_reason(place: Place, rng: np.random.Generator) -> None:
    good, other, taken = vector(rng), vector(rng), uuid.uuid4().hex
    file = [
        ndjson.header_line(HEADER),
        line("a", good, template=taken),
        b"{not json\n",
        b"\n",
        line("a/b", good),
        line("a", [1.0] * 7),
        line("a", [0.0] * 8),
        line("a", "???"),
        line("b", good, template=taken),
        line("a", other, template=taken),
        line("a", other, template="XYZ"),
        line("a", other, kind="video"),
        line("a", other, nmae="misspelt"),
        line("a", other, tags=["x" * 65]),
        line("a", other, metadata=[1]),
        line("a", other, name="null \0"),
        line("a", other, created_at="yesterday"),
        line("a", np.full(8, np.nan)),
        line("a", None, template=uuid.uuid4().hex),
        b'{"subject": 7}\n',
        line("last", other),
    ]
    report = place.take(b"".join(file))
    assert {r.number: r.error.code for r in report.refusals} == {
        3: "item_invalid",
        5: "item_invalid",
        6: "embedding_invalid",
        7: "embedding_invalid",
        8: "embedding_invalid",
        9: "template_conflict",
        10: "template_conflict",
        **dict.fromkeys(range(11, 18), "item_invalid"),
        18: "embedding_invalid",
        19: "embedding_invalid",
        20: "item_invalid",
    }
    assert (report.subjects, report.templates, report.refused) == (2, 2, 17)
    assert [s.id for s in place.store.list_subjects(place.gallery, None, 10, SubjectFilter())] == ["a", "last"]
    later = place.take(line("b", good, template=taken) + line("a", other, template=taken))
    assert [r.error.code for r in later.refusals] == ["template_conflict"] * 2


def test_a_subject_that_exists_keeps_what_is_said_of_it(place: Place, rng: np.random.Generator) -> None:
    place.store.put_subject(place.gallery, "a", "Ada", {"room": 1}, ["x"])
    place.take(line("a", vector(rng), name="Other", metadata={"room": 2}, tags=["y"]))
    subject = place.store.subject(place.gallery, "a")
    assert (subject.name, subject.metadata, subject.tags, subject.templates) == ("Ada", {"room": 1}, ["x"], 1)


def test_what_the_database_refuses_is_a_storage_error(place: Place, rng: np.random.Generator) -> None:
    place.take(line("a", vector(rng)))
    with place.store._database.write(ItemError("")) as connection:
        connection.exec_driver_sql("DROP TABLE labels")
    with pytest.raises(StorageError, match="labels"):
        place.take(line("b", vector(rng), tags=["x"]))
    assert place.store.gallery("g").templates == len(place.contents()) == 1


def test_long_lines_do_not_pile_up() -> None:
    lines = ndjson.Lines(HEADER)
    long = line("a", [1.0] * 8, metadata={"x": "y" * 5_000_000})
    assert [len(block) for _ in range(30) for block in lines.feed(long)] == [13, 13]
    assert [len(block) for block in lines.end()] == [4]


def test_crops_go_along_if_asked_and_where_they_are_kept(
    place: Place, rng: np.random.Generator, tmp_path: Path
) -> None:
    face = {"crop": base64.b64encode(b"RIFF....WEBP\0\xff").decode(), "landmarks": [[1.5, 2.0]] * 5}
    keeping = place.store.update_gallery("g", lambda settings: replace(settings, keep_crops=True))
    report = place.take(
        line("a", vector(rng), **face) + line("a", vector(rng)) + line("a", vector(rng), **face | {"landmarks": [[1]]}),
        gallery=keeping,
    )
    assert [(r.number, r.error.code) for r in report.refusals] == [(3, "item_invalid")]
    elsewhere = Place(f"sqlite:///{tmp_path / 'elsewhere.db'}")
    for kind in FORMATS:
        file = b"".join(export(place.bulk, "g", kind, lambda _: {}, crops=True))
        for keep in (True, False):
            elsewhere.another(f"{kind}-{keep}")
            kept = partial(replace, keep_crops=keep)
            copy = elsewhere.store.update_gallery(f"{kind}-{keep}", kept)
            assert elsewhere.take(file, kind, copy).templates == 2
            out = b"".join(export(elsewhere.bulk, copy.name, "ndjson", lambda _: {}, crops=True))
            _, with_crop, without = map(orjson.loads, out.splitlines())
            assert {key: with_crop.get(key) for key in face} == (face if keep else dict.fromkeys(face))
            assert "crop" not in without
    assert b"crop" not in place.file()
    elsewhere.store.close()


def test_items_may_be_skipped(place: Place, rng: np.random.Generator) -> None:
    file = b"".join(line(f"s{i}", vector(rng)) for i in range(5))
    report = place.take(file, skip=3)
    assert (report.items, report.templates) == (2, 2)


def test_parquet_of_other_hands(place: Place, rng: np.random.Generator) -> None:
    vectors = [vector(rng).astype(np.float64).tolist(), [1.0] * 7, None, vector(rng).tolist()]
    table = pa.table({"subject": ["a", "b", "c", "d"], "embedding": pa.array(vectors), "age": [1, 2, 3, 4]})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    reader = parquet.Reader(buffer, HEADER)
    taking = Import(place.bulk, place.gallery)
    taking.take_all(reader)
    assert [(r.number, r.error.code) for r in taking.report.refusals] == [(2, "embedding_invalid")]
    assert (taking.report.subjects, taking.report.templates) == (3, 2)


@pytest.mark.parametrize(
    ("header", "error"),
    [
        ({"kith": "gallery", "version": 2, "recogniser": FINGERPRINT, "dimension": 8}, ImportFileError),
        ({"kith": "gallery", "version": 1, "recogniser": FINGERPRINT, "dimension": 9}, ImportFileError),
        ({"kith": "gallery", "version": 1, "recogniser": FINGERPRINT, "dimension": -8}, ImportFileError),
        ({"kith": "gallery", "version": 1, "dimension": 8}, ImportFileError),
        ({"kith": "gallery", "version": 1, "recogniser": "e" * 32, "dimension": 8}, RecogniserMismatchError),
        (HEADER.document() | {"embeddings": False}, ImportFileError),
    ],
)
def test_files_that_are_not_for_this_gallery(place: Place, header: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        for _ in ndjson.Lines().feed(orjson.dumps(header) + b"\n"):
            pass
        Import(place.bulk, place.gallery).accept(Header.of(header))


@pytest.mark.parametrize("file", [b"", b"PAR1", b"PAR1" + b"x" * 100 + b"PAR1", b'{"subject": "a"}\n'])
def test_files_that_are_none(file: bytes) -> None:
    with pytest.raises(ImportFileError):
        parquet.Reader(io.BytesIO(file))
    with pytest.raises(ImportFileError):
        list(ndjson.Lines().feed(file)) + list(ndjson.Lines().end())


@settings(max_examples=50, deadline=None)
@given(scale=st.floats(1e-5, 1e5), seed=st.integers(0, 100))
def test_vectors_become_unit_vectors_and_stay_what_they_are(scale: float, seed: int) -> None:
    given_vectors = np.random.default_rng(seed).normal(size=(4, DIMENSION)).astype(np.float32) * np.float32(scale)
    file = b"".join(line(f"s{i}", v) for i, v in enumerate(given_vectors))
    (block,) = [*(lines := ndjson.Lines(HEADER)).feed(file), *lines.end()]
    once, refused = check(block, DIMENSION)
    assert not refused
    np.testing.assert_allclose(np.linalg.norm(once.vectors.astype(np.float64), axis=1), 1, atol=2e-6)
    np.testing.assert_allclose(once.vectors, unit(given_vectors), atol=1e-6)
    twice, _ = check(once, DIMENSION)
    assert np.array_equal(once.vectors, twice.vectors)


def test_an_export_is_one_moment_while_others_write(place: Place, rng: np.random.Generator) -> None:
    """Two templates at a time are enrolled, subjects in the order of their names: nothing in between may show."""
    stop = threading.Event()

    def write() -> None:
        own = np.random.default_rng(3)
        for i in range(10_000):
            if stop.is_set():
                return
            pair = [NewTemplate(uuid.uuid4().hex, vector(own), "embedding") for _ in range(2)]
            place.store.enrol(place.gallery, f"s{i:05d}", pair, None)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        sizes: set[int] = set()
        while len(sizes) < 5:
            pieces = export(place.bulk, "g", "ndjson", lambda _: {})
            header = orjson.loads(next(pieces))
            before = place.store.gallery("g").templates
            while place.store.gallery("g").templates < before + 2:
                pass  # what is written now must not show
            subjects = [orjson.loads(text)["subject"] for piece in pieces for text in piece.splitlines()]
            assert len(subjects) == header["templates"] <= before
            assert subjects == [f"s{i:05d}" for i in range(len(subjects) // 2) for _ in range(2)]
            sizes.add(len(subjects))
    finally:
        stop.set()
        writer.join()


def big_file(path: Path, count: int, dimension: int) -> None:
    header = Header(FINGERPRINT, dimension)
    writer = parquet.Writer(header)
    rng = np.random.default_rng(1)
    with path.open("wb") as file:
        for start in range(0, count, 5000):
            n = min(5000, count - start)
            vectors = unit(rng.normal(size=(n, dimension)))
            nothing: list[None] = [None] * n
            ids = [uuid.UUID(int=start + i).hex for i in range(n)]
            names = [f"s{start + i}" for i in range(n)]
            numbers = range(start + 1, start + n + 1)
            columns: list[Any] = [numbers, names, *[nothing] * 5, ids, *[nothing] * 5, vectors, np.ones(n, np.bool_)]
            items = Items(*columns)
            file.write(writer.write(items))
        file.write(writer.end())


IMPORTER = textwrap.dedent("""
    import sys
    from service.gallery.bulk import BulkStore
    from service.gallery.database import Database, open_engine
    from service.gallery.importing import Import
    from service.gallery.parquet import Reader
    from service.gallery.store import Store
    database = Database(open_engine(sys.argv[1]))
    taking = Import(BulkStore(database), Store(database).gallery("g"))
    with open(sys.argv[2], "rb") as file:
        for block in Reader(file):
            taking.take(block)
            with open("/proc/self/statm") as memory:
                pages = memory.read().split()[1]
            print(taking.report.templates + taking.report.present, pages, flush=True)
""")


def test_a_killed_import_is_resumed_by_the_same_file(database_url: DatabaseUrl, tmp_path: Path) -> None:
    url, file, count = database_url(), tmp_path / "file.parquet", 20_000
    big_file(file, count, DIMENSION)
    place = Place(url)
    for kill_after in (1, 2, None):
        command = [sys.executable, "-c", IMPORTER, url, str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(kill_after)] if kill_after else list(process.stdout)
            if kill_after:
                process.kill()
        there = place.store.gallery("g")
        if kill_after:
            assert int(said[-1].split()[0]) <= there.templates <= count
        assert there.templates == there.subjects == len(place.store.changes_after(place.gallery, 0))
        assert len(place.store.snapshot(place.gallery).template_pks) == there.templates
    assert there.templates == count
    place.store.close()
    with open_check(url) as examined:
        assert not list(examined.findings(None, repair=False))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    file, url = tmp_path / "file.parquet", f"sqlite:///{tmp_path / 'kith.db'}"
    big_file(file, 60_000, 512)
    Place(url, 512).store.close()
    command = [sys.executable, "-c", IMPORTER, url, str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    counts, pages = zip(*(map(int, text.split()) for text in done.stdout.splitlines()), strict=True)
    assert counts[-1] == 60_000
    # By the third block all that is kept between blocks is there; 70 MB of the file are still to come.
    assert (max(pages[3:]) - pages[2]) * resource.getpagesize() < 40_000_000


# Over HTTP


def address(kith: Kith) -> str:
    return str(kith._http.base_url).rstrip("/")


def rest(kith: Kith, gallery: str, file: bytes, kind: str = "application/x-ndjson", **params: Any) -> httpx.Response:
    coding = params.pop("coding", None)
    headers = {"Content-Type": kind} | ({"Content-Encoding": coding} if coding else {})
    url = f"{address(kith)}/v1/galleries/{gallery}/import"
    return httpx.post(url, content=file, headers=headers, params=params, timeout=60)


def header_of(kith: Kith) -> bytes:
    model = kith.model()
    return ndjson.header_line(Header(model.recogniser, model.dimension))


def people(kith: Kith, count: int) -> bytes:
    rng = np.random.default_rng(2)
    vectors = unit(rng.normal(size=(count, kith.model().dimension)))
    return b"".join(line(f"s{i}", v) for i, v in enumerate(vectors))


def test_more_than_a_request_may_have_goes_through_an_import(kith: Kith, gallery: str) -> None:
    file = header_of(kith) + people(kith, 3000)
    assert len(file) > 1_500_000
    answer = rest(kith, gallery, file)
    assert answer.status_code == 200
    assert answer.json()["templates"] == 3000
    assert kith.gallery(gallery).templates == 3000
    probe = np.random.default_rng(2).normal(size=(1, kith.model().dimension))
    (found,) = kith.identify(gallery, embeddings=list(probe), risk={"threshold": 0.9}).results
    assert found.subject == "s0"


def test_gzip_is_unpacked(kith: Kith, gallery: str) -> None:
    packed = gzip.compress(header_of(kith) + people(kith, 10))
    assert rest(kith, gallery, packed, coding="gzip").json()["templates"] == 10
    assert (
        rest(kith, gallery, packed + packed, coding="gzip").json()["refused"] == 1
    )  # a header where an item should be
    short = rest(kith, gallery, packed[:-20], coding="gzip").json()
    assert (short["code"], short["report"]["templates"]) == ("import_invalid", 0)
    assert rest(kith, gallery, b"not gzip", coding="gzip").json()["code"] == "import_invalid"
    assert rest(kith, gallery, packed, coding="br").json()["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("kind", "file", "params", "code"),
    [
        ("application/json", b"{}", {}, "unsupported_media_type"),
        ("application/x-ndjson", b"", {}, "import_invalid"),
        ("application/x-ndjson", b"not json", {}, "import_invalid"),
        ("application/x-ndjson", b'{"subject": "a"}', {}, "import_invalid"),
        ("application/x-ndjson", b'{"subject": "a"}', {"recogniser": "e" * 32}, "recogniser_mismatch"),
        ("application/x-ndjson", b'{"subject": "a"}', {"recogniser": "no"}, "invalid_request"),
        ("application/x-ndjson", b"x" * 11_000_000, {"recogniser": "e" * 32}, "import_invalid"),
        ("application/vnd.apache.parquet", b"PAR1", {}, "import_invalid"),
    ],
)
def test_a_refused_import_says_why(
    kith: Kith, gallery: str, kind: str, file: bytes, params: dict[str, str], code: str
) -> None:
    answer = rest(kith, gallery, file, kind, **params)
    assert (answer.json()["code"], answer.status_code // 100) == (code, 4)
    assert kith.gallery(gallery).templates == 0


def test_a_file_without_header_needs_its_recogniser_named(kith: Kith, gallery: str) -> None:
    answer = rest(kith, gallery, people(kith, 5), recogniser=kith.model().recogniser).json()
    assert (answer["templates"], answer["refused"]) == (5, 0)


def test_a_gallery_can_be_made_by_its_export(kith: Kith, gallery: str) -> None:
    kith.update_gallery(gallery, fusion="max", risk={"fmr": 0.01}, min_margin=0.07)
    rest(kith, gallery, header_of(kith) + people(kith, 5))
    for kind in FORMATS:
        file = b"".join(kith.export_gallery(gallery, kind))
        media_type = "application/vnd.apache.parquet" if kind == "parquet" else "application/x-ndjson"
        assert rest(kith, "copy", file, media_type).json()["code"] == "gallery_not_found"
        assert rest(kith, "copy", file, media_type, create=True).json()["templates"] == 5
        copy, origin = kith.gallery("copy"), kith.gallery(gallery)
        assert (copy.fusion, copy.risk, copy.min_margin) == (origin.fusion, origin.risk, origin.min_margin)
        kith.delete_gallery("copy")
    with pytest.raises(KithClientError, match="gallery_not_found"):
        list(kith.export_gallery("copy"))
    stranger = ndjson.header_line(Header("e" * 32, kith.model().dimension))
    assert rest(kith, "copy", stranger, create=True).json()["code"] == "recogniser_mismatch"
    with pytest.raises(KithClientError, match="gallery_not_found"):
        kith.gallery("copy")


def test_who_goes_away_ends_the_export(kith: Kith, gallery: str) -> None:
    rest(kith, gallery, header_of(kith) + people(kith, 9000))
    for _ in range(17):  # more than there are connections to the database
        pieces = kith.export_gallery(gallery)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
    assert kith.gallery(gallery).templates == 9000


def test_an_export_may_leave_embeddings_out(kith: Kith, gallery: str) -> None:
    rest(kith, gallery, header_of(kith) + people(kith, 2))
    first, *rest_of = b"".join(kith.export_gallery(gallery, embeddings=False)).splitlines()
    assert orjson.loads(first)["embeddings"] is False
    assert all("embedding" not in orjson.loads(text) for text in rest_of)


@pytest.mark.parametrize("suffix", ["ndjson", "ndjson.gz", "parquet"])
def test_the_command_line_takes_a_gallery_out_and_in(kith: Kith, gallery: str, tmp_path: Path, suffix: str) -> None:
    rest(kith, gallery, header_of(kith) + people(kith, 7))
    url, file = address(kith), str(tmp_path / f"file.{suffix}")
    run = CliRunner().invoke
    assert run(app, ["gallery", "export", gallery, file, "--url", url]).exit_code == 0
    done = run(app, ["gallery", "import", f"{gallery}-2", file, "--create", "--url", url, "--json"])
    assert done.exit_code == 0, done.output
    assert orjson.loads(done.stdout)["templates"] == 7
    kith.delete_gallery(f"{gallery}-2")
    assert run(app, ["gallery", "import", gallery, __file__, "--url", url]).exit_code == 2


def test_times_are_kept_to_the_microsecond(place: Place, rng: np.random.Generator) -> None:
    place.take(line("a", vector(rng), created_at="2001-02-03T04:05:06.000007+02:00"))
    (template,) = place.store.list_templates(place.gallery, "a")
    assert template.created_at == datetime(2001, 2, 3, 2, 5, 6, 7, UTC)
