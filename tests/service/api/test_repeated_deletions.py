"""A repeated deletion answers the receipt of the first one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kith import Kith, KithClientError
from kith.wire.erasures import DeletedOut


@pytest.fixture
def embeddings(kith: Kith, rng: np.random.Generator) -> list[np.ndarray]:
    return list(rng.normal(size=(2, kith.model().dimension)).astype(np.float32))


def same(one: DeletedOut, other: DeletedOut) -> bool:
    """Compare without ``log_emptied``, which is the state of SQLite's log at the time of the answer."""
    unstable = {"receipt": {"log_emptied"}}
    return one.model_dump(exclude=unstable) == other.model_dump(exclude=unstable)


def test_of_a_subject(kith: Kith, gallery: str, embeddings: list[np.ndarray]) -> None:
    kith.enroll(gallery, "ada", embeddings=embeddings, allow_duplicate=True, allow_inconsistent=True)
    first = kith.delete_subject(gallery, "ada")
    assert first.template_count == 2
    assert same(kith.delete_subject(gallery, "ada"), first)
    with pytest.raises(KithClientError, match="subject_not_found"):
        kith.delete_subject(gallery, "adda")  # never existed
    kith.put_subject(gallery, "ada")  # a new decision
    second = kith.delete_subject(gallery, "ada")
    assert (second.template_count, second.receipt.id != first.receipt.id) == (0, True)
    assert same(kith.delete_subject(gallery, "ada"), second)
    assert len(list(kith.erasures(gallery, "ada"))) == 2


def test_of_a_template(kith: Kith, gallery: str, embeddings: list[np.ndarray]) -> None:
    enrolled = kith.enroll(gallery, "ada", embeddings=embeddings, allow_duplicate=True, allow_inconsistent=True)
    (one, two) = (str(result.template) for result in enrolled.results)
    kith.put_subject(gallery, "tom")
    first = kith.delete_template(gallery, "ada", one)
    assert same(kith.delete_template(gallery, "ada", one), first)
    for subject, template in (("tom", one), ("tom", two), ("ada", "0" * 32)):
        with pytest.raises(KithClientError, match="template_not_found"):
            kith.delete_template(gallery, subject, template)
    kith.delete_subject(gallery, "ada")
    assert same(kith.delete_template(gallery, "ada", one), first)


def test_of_a_gallery(kith: Kith) -> None:
    kith.create_gallery("deleted-twice")
    kith.put_subject("deleted-twice", "ada")
    first = kith.delete_gallery("deleted-twice")
    assert first.subject_count == 1
    assert same(kith.delete_gallery("deleted-twice"), first)
    kith.create_gallery("deleted-twice")
    assert kith.delete_gallery("deleted-twice").subject_count == 0
    with pytest.raises(KithClientError, match="gallery_not_found"):
        kith.delete_gallery("never-created")


def test_of_a_merged_subject_finds_none_because_its_data_live_on(
    kith: Kith, gallery: str, embeddings: list[np.ndarray]
) -> None:
    kith.enroll(gallery, "countess", embeddings=embeddings[:1])
    kith.put_subject(gallery, "ada")
    merged = kith.merge_subject(gallery, "countess", "ada")
    with pytest.raises(KithClientError, match="subject_not_found") as raised:
        kith.delete_subject(gallery, "countess")
    assert raised.value.problem["receipt"]["id"] == merged.receipt.id


def test_at_the_same_time_all_get_one_receipt(kith: Kith, gallery: str) -> None:
    kith.put_subject(gallery, "ada")

    def delete(_: int) -> DeletedOut:
        return kith.delete_subject(gallery, "ada")

    with ThreadPoolExecutor(8) as desks:
        assert len({answer.receipt.id for answer in desks.map(delete, range(8))}) == 1
    kith.create_gallery("at-the-same-time")
    with ThreadPoolExecutor(8) as desks:
        answers = list(desks.map(lambda _: kith.delete_gallery("at-the-same-time"), range(8)))
    assert len({answer.receipt.id for answer in answers}) == 1
