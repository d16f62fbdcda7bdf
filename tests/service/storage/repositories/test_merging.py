"""Two subjects who are one person become one, whole or not at all, once however often it is asked."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kith import Kith, KithClientError
from kith.wire.fields import MAX_LABELS
from service.cli.main import app
from service.core.errors import InvalidRequestError
from service.domain.gallery import SubjectFilter, SubjectRecord
from service.storage.audit.log import AuditFilter, listed_lines
from service.storage.db.engine import Database
from service.storage.db.row_sealing import subject_lookup
from service.storage.repositories.store import Store
from service.storage.repositories.subjects import merged_record
from tests.databases import ON_BOTH
from tests.packs import BUNDLED_DIMENSION
from tests.service.storage.scene import made, some


@pytest.fixture
def store(database: Database, rng: np.random.Generator) -> Store:
    """Store with a gallery "g": "ada", and "countess", who is the same person."""
    store, gallery = Store(database), made(database)
    store.templates.enroll(gallery, "ada", some(rng, 2), None)
    store.templates.enroll(gallery, "countess", some(rng, 3), None)
    store.subjects.put(gallery, "ada", None, {"floor": 1, "desk": 4}, ["night"])
    store.subjects.put(gallery, "countess", "The Countess", {"floor": 2, "team": "engine"}, ["night", "founder"])
    return store


def test_who_stays_is_right() -> None:
    kept, gone = (
        SubjectRecord("a", "Ada", {"x": None, "y": 1}, ["b", "a"]),
        SubjectRecord("c", "Countess", {"x": 2, "z": 3}, ["c", "a"]),
    )
    both = {"name": "Ada", "metadata": {"x": None, "y": 1, "z": 3}, "tags": ["b", "a", "c"]}
    assert merged_record(kept, gone) == both
    of_gone, of_kept = ({name: getattr(one, name) for name in both} for one in (gone, kept))
    assert merged_record(SubjectRecord("a", None, {}, []), gone) == of_gone
    assert merged_record(kept, SubjectRecord("c", None, {}, [])) == of_kept
    many = [str(number) for number in range(MAX_LABELS)]
    assert merged_record(SubjectRecord("a", None, {}, many), SubjectRecord("c", None, {}, many))["tags"] == many
    with pytest.raises(InvalidRequestError, match="101 tags"):
        merged_record(SubjectRecord("a", None, {}, many), SubjectRecord("c", None, {}, ["another"]))
    with pytest.raises(InvalidRequestError, match="101 entries of metadata"):
        merged_record(
            SubjectRecord("a", None, dict.fromkeys(many, 1), []), SubjectRecord("c", None, {"another": 1}, [])
        )


@ON_BOTH
def test_everything_of_one_is_the_others(database: Database, store: Store) -> None:
    gallery = store.galleries.get("g")
    done = store.subjects.merge(gallery, "countess", "ada")
    assert (done.template_count, done.subject.template_count, done.subject.name) == (3, 5, "The Countess")
    assert done.subject.metadata == {"floor": 1, "desk": 4, "team": "engine"}
    assert done.subject.tags == ["night", "founder"]
    now = store.galleries.get("g")
    assert len(store.subjects.matching_pks(now, SubjectFilter(metadata=(("floor", 2),)))) == 0
    assert (done.receipt.kind, done.receipt.removed) == ("moved", {"subjects": 1, "templates": 3})
    lines = list(listed_lines(database, AuditFilter(now.pk), None, 2))
    seen = [(line.event, line.subject, line.details.get("into"), line.details.get("merged")) for line in lines]
    ada, countess = (subject_lookup(now.seal, name) for name in ("ada", "countess"))
    assert seen == [("subject_merged", countess, ada, None), ("subject_changed", ada, None, countess)]
    assert lines[1].details["changed"] == ["metadata", "name", "tags"]


def test_over_http(kith: Kith, gallery: str, server: str) -> None:
    for number, name in enumerate(("ada", "countess", "augusta")):
        axis = np.asarray(np.eye(BUNDLED_DIMENSION)[number], np.float32)
        kith.enroll(gallery, name, embeddings=[axis])
    done = kith.merge_subject(gallery, "countess", "ada")
    assert (done.subject.id, done.subject.template_count, done.template_count) == ("ada", 2, 1)
    again = kith.merge_subject(gallery, "countess", "ada")
    assert (again.subject, again.template_count, again.receipt.id) == (done.subject, 1, done.receipt.id)
    assert [(each.id, each.kind) for each in kith.erasures(gallery, "countess")] == [(done.receipt.id, "moved")]
    (seen,) = kith.identify(gallery, embeddings=[np.asarray(np.eye(BUNDLED_DIMENSION)[1], np.float32)]).results
    assert [candidate.subject for candidate in seen.candidates] == ["ada", "augusta"]
    for subject, into, code in (("ada", "ada", "invalid_request"), ("nobody", "ada", "subject_not_found")):
        with pytest.raises(KithClientError) as refused:
            kith.merge_subject(gallery, subject, into)
        assert refused.value.code == code
        assert "receipt" not in refused.value.problem
    for call, further in ((kith.merge_subject, ["augusta"]), (kith.delete_subject, [])):  # her data live on
        with pytest.raises(KithClientError, match="subject_not_found") as elsewhere:
            call(gallery, "countess", *further)
        assert elsewhere.value.problem["receipt"]["id"] == done.receipt.id
    command = ["subject", "merge", "augusta", "-g", gallery, "--into", "ada", "--url", server]
    assert CliRunner().invoke(app, command, input="n\n").exit_code != 0
    assert "Templates: 3, moved: 1;" in CliRunner().invoke(app, [*command, "--yes"]).output
    assert json.loads(CliRunner().invoke(app, [*command, "--yes", "--json"]).output)["subject"]["template_count"] == 3
