"""Two subjects who are one person become one, whole or not at all, once however often it is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest
from typer.testing import CliRunner

from models.network import Float
from models.recognition import unit
from service.cli import app
from service.client import Kith, KithClientError
from service.errors import InvalidRequestError, StorageError, SubjectErasedError, SubjectNotFoundError
from service.gallery import erasure
from service.gallery.audit_reading import AuditReader, Chosen
from service.gallery.database import Database
from service.gallery.erasure import Erasures
from service.gallery.follower import Followers
from service.gallery.merging import MOST, merged
from service.gallery.replicas import in_process
from service.gallery.sealed_rows import About, lookup_of
from service.gallery.store import Store
from service.gallery.subjects import Gallery, GallerySettings, NewTemplate, SubjectFilter
from tests.databases import open_database
from tests.postgres import DatabaseUrl

DIMENSION: Final = 16


@pytest.fixture
def database(database_url: DatabaseUrl) -> Iterator[Database]:
    opened = open_database(database_url())
    yield opened
    opened.close()


@pytest.fixture
def store(database: Database, rng: np.random.Generator) -> Store:
    """Of a gallery "g" with "ada", whose other self is "countess", and "tom"."""
    made = Store(database)
    gallery = made.create_gallery("g", "f" * 32, DIMENSION, GallerySettings(fusion="max"))
    for name, count in (("ada", 2), ("countess", 3), ("tom", 1)):
        made.enrol(gallery, name, [_template(vector) for vector in _drawn(rng, count)], None)
    made.put_subject(gallery, "ada", None, {"floor": 1, "desk": 4}, ["night"])
    made.put_subject(gallery, "countess", "The Countess", {"floor": 2, "team": "engine"}, ["night", "founder"])
    return made


def test_who_stays_is_right() -> None:
    kept, gone = (
        About("a", "Ada", {"x": None, "y": 1}, ["b", "a"]),
        About("c", "Countess", {"x": 2, "z": 3}, ["c", "a"]),
    )
    assert merged(kept, gone) == About("a", "Ada", {"x": None, "y": 1, "z": 3}, ["b", "a", "c"])
    assert merged(About("a", None, {}, []), gone) == About("a", "Countess", gone.metadata, gone.tags)
    assert merged(kept, About("c", None, {}, [])) == kept
    many = [str(number) for number in range(MOST)]
    assert merged(About("a", None, {}, many), About("c", None, {}, many)).tags == many
    with pytest.raises(InvalidRequestError, match="101 tags"):
        merged(About("a", None, {}, many), About("c", None, {}, ["another"]))
    with pytest.raises(InvalidRequestError, match="101 entries of metadata"):
        merged(About("a", None, dict.fromkeys(many, 1), []), About("c", None, {"another": 1}, []))


def test_everything_of_one_is_the_others(database: Database, store: Store) -> None:
    gallery = store.gallery("g")
    followers = Followers(in_process(store))
    of_countess = store.subject_vectors(gallery, "countess")[0]
    assert _best(followers, gallery, store, of_countess) == ["countess"] * 3
    ids = [template.id for name in ("ada", "countess") for template in store.list_templates(gallery, name)]

    done = store.merge_subject(gallery, "countess", "ada")
    assert (done.templates, done.into.templates, done.into.name) == (3, 5, "The Countess")
    assert done.into.metadata == {"floor": 1, "desk": 4, "team": "engine"}
    assert done.into.tags == ["night", "founder"]
    now = store.gallery("g")
    assert (now.subjects, now.templates) == (2, 6)
    assert [template.id for template in store.list_templates(now, "ada")] == ids
    assert _best(followers, now, store, of_countess) == ["ada"] * 3
    for chosen, count in ((SubjectFilter(("founder",)), 1), (SubjectFilter(metadata=(("floor", 2),)), 0)):
        assert len(store.matching_subjects(now, chosen)) == count
    with pytest.raises(SubjectNotFoundError):
        store.subject(now, "countess")

    assert done.receipt.removed == {"labels": 4, "subjects": 1}
    assert Erasures(database).verdict(done.receipt.id).holds
    lines = [each.line for each in AuditReader(database).lines(Chosen(now.pk), None, 2)]
    seen = [(line.event, line.subject, line.details.get("into"), line.details.get("merged")) for line in lines]
    ada, countess = (lookup_of(now.seal, name) for name in ("ada", "countess"))
    assert seen == [("subject_merged", countess, ada, None), ("subject_changed", ada, None, countess)]
    assert lines[1].details["changed"] == ["metadata", "name", "tags"]


def test_what_is_done_is_told_again_and_not_done_again(store: Store) -> None:
    begun = store.gallery("g")
    first = store.merge_subject(begun, "countess", "ada")
    for gallery in (begun, store.gallery("g")):  # repeated before the answer came, or after
        again = store.merge_subject(gallery, "countess", "ada")
        assert (again.into, again.templates, again.receipt.id) == (first.into, 3, first.receipt.id)
    with pytest.raises(SubjectNotFoundError) as elsewhere:
        store.merge_subject(store.gallery("g"), "countess", "tom")
    assert elsewhere.value.document()["receipt"]["id"] == first.receipt.id
    store.delete_subject(store.gallery("g"), "tom")
    for subject, into in (("tom", "ada"), ("ada", "nobody"), ("nobody", "ada")):
        with pytest.raises(SubjectNotFoundError):
            store.merge_subject(store.gallery("g"), subject, into)
    with pytest.raises(InvalidRequestError):
        store.merge_subject(store.gallery("g"), "ada", "ada")


def test_what_began_before_brings_nobody_back(store: Store, rng: np.random.Generator) -> None:
    begun = store.gallery("g")
    store.merge_subject(begun, "countess", "ada")
    with pytest.raises(SubjectErasedError):
        store.enrol(begun, "countess", [_template(vector) for vector in _drawn(rng, 1)], None)
    store.enrol(store.gallery("g"), "countess", [_template(vector) for vector in _drawn(rng, 1)], None)
    for subject, into in (("countess", "tom"), ("tom", "countess")):  # she is another one since
        with pytest.raises(SubjectErasedError):
            store.merge_subject(begun, subject, into)
    assert store.merge_subject(store.gallery("g"), "countess", "tom").templates == 1


def test_it_is_done_whole_or_not_at_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = store.gallery("g")
    before = [store.subject(gallery, name) for name in ("ada", "countess")]

    def full(*_: object, **__: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(erasure, "write_down", full)
        with pytest.raises(StorageError):
            store.merge_subject(gallery, "countess", "ada")
    assert [store.subject(gallery, name) for name in ("ada", "countess")] == before
    assert store.gallery("g").version == gallery.version


def test_over_http(kith: Kith, gallery: str, server: str) -> None:
    for number, name in enumerate(("ada", "countess", "augusta")):
        axis = np.asarray(np.eye(128)[number], np.float32)
        kith.enrol(gallery, name, embeddings=[axis])
    done = kith.merge_subject(gallery, "countess", "ada")
    assert (done.subject.id, done.subject.templates, done.templates) == ("ada", 2, 1)
    again = kith.merge_subject(gallery, "countess", "ada")
    assert (again.subject, again.templates, again.receipt.id) == (done.subject, 1, done.receipt.id)
    assert kith.verify_receipt(done.receipt.id).holds
    (seen,) = kith.identify(gallery, embeddings=[np.asarray(np.eye(128)[1], np.float32)]).results
    assert [candidate.subject for candidate in seen.candidates] == ["ada", "augusta"]
    for subject, into, code in (("ada", "ada", "invalid_request"), ("nobody", "ada", "subject_not_found")):
        with pytest.raises(KithClientError) as refused:
            kith.merge_subject(gallery, subject, into)
        assert refused.value.code == code
    command = ["subject", "merge", "augusta", "-g", gallery, "--into", "ada", "--url", server]
    assert CliRunner().invoke(app, command, input="n\n").exit_code != 0
    assert "ada has 1 more, 3 in all" in CliRunner().invoke(app, [*command, "--yes"]).output
    assert json.loads(CliRunner().invoke(app, [*command, "--yes", "--json"]).output)["subject"]["templates"] == 3


def _best(followers: Followers, gallery: Gallery, store: Store, probes: Float) -> list[str]:
    results, _ = followers.of(gallery).search(probes, 1)
    names = store.named(gallery, [hit.subject_pk for (hit, *_) in results])
    return [names[hit.subject_pk].id for (hit, *_) in results]


def _drawn(rng: np.random.Generator, count: int) -> Float:
    return unit(rng.normal(size=(count, DIMENSION)).astype(np.float32))


def _template(vector: Float) -> NewTemplate:
    return NewTemplate(np.random.default_rng().bytes(16).hex(), vector, "embedding")
