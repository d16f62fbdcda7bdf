"""A repeated deletion answers the receipt of the first one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from kith.wire.erasures import DeletedOut
from tests.conftest import jpeg
from tests.refusals import refusal


def same(one: DeletedOut, other: DeletedOut) -> bool:
    """Compare without ``log_emptied``, which is the state of SQLite's log at the time of the answer."""
    unstable = {"receipt": {"log_emptied"}}
    return one.model_dump(exclude=unstable) == other.model_dump(exclude=unstable)


def test_of_a_subject_a_template_a_stranger_and_a_gallery(
    kith: Kith, gallery: str, rng: np.random.Generator, astronaut: NDArray[np.uint8]
) -> None:
    embeddings = list(rng.normal(size=(2, kith.model().dimension)).astype(np.float32))
    enrolled = kith.enroll(gallery, "ada", embeddings=embeddings, allow_duplicate=True, allow_inconsistent=True)
    one, two = (str(result.template) for result in enrolled.results)
    kith.put_subject(gallery, "tom")
    template = kith.delete_template(gallery, "ada", one)
    assert same(kith.delete_template(gallery, "ada", one), template)
    for subject, other in (("tom", one), ("tom", two), ("ada", "0" * 32)):
        assert refusal(kith.delete_template, gallery, subject, other) == (404, "template_not_found")
    first = kith.delete_subject(gallery, "ada")
    assert first.template_count == 1
    assert same(kith.delete_subject(gallery, "ada"), first)
    assert same(kith.delete_template(gallery, "ada", one), template)
    assert refusal(kith.delete_subject, gallery, "adda") == (404, "subject_not_found")  # never existed
    kith.put_subject(gallery, "ada")  # a new decision
    second = kith.delete_subject(gallery, "ada")
    assert (second.template_count, second.receipt.id != first.receipt.id) == (0, True)
    assert same(kith.delete_subject(gallery, "ada"), second)
    assert len(list(kith.erasures(gallery, "ada"))) == 3

    kith.update_gallery(gallery, remember_strangers_days=30)
    stranger = kith.identify(gallery, jpeg(astronaut), faces="largest").results[0].stranger
    assert stranger is not None
    forgotten = kith.forget_stranger(gallery, stranger.id)
    assert same(kith.forget_stranger(gallery, stranger.id), forgotten)

    name = kith.create_gallery("deleted-twice").name
    kith.put_subject(name, "ada")
    deleted = kith.delete_gallery(name)
    assert deleted.subject_count == 1
    assert same(kith.delete_gallery(name), deleted)
    kith.create_gallery(name)
    assert kith.delete_gallery(name).subject_count == 0
    assert refusal(kith.delete_gallery, "never-created") == (404, "gallery_not_found")


def test_of_a_merged_subject_finds_none_because_its_data_live_on(kith: Kith, gallery: str) -> None:
    for name in ("countess", "ada"):
        kith.put_subject(gallery, name)
    merged = kith.merge_subject(gallery, "countess", "ada")
    with pytest.raises(KithClientError, match="subject_not_found") as raised:
        kith.delete_subject(gallery, "countess")
    assert raised.value.problem["receipt"]["id"] == merged.receipt.id


def test_at_the_same_time_all_get_one_receipt(kith: Kith, gallery: str) -> None:
    kith.put_subject(gallery, "ada")
    kith.create_gallery("at-the-same-time")
    deletions = (partial(kith.delete_subject, gallery, "ada"), partial(kith.delete_gallery, "at-the-same-time"))
    for delete in deletions:
        with ThreadPoolExecutor(8) as desks:
            answers = [desks.submit(delete) for _ in range(8)]
        assert len({answer.result().receipt.id for answer in answers}) == 1
