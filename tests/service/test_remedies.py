"""What a refusal tells to do, at a terminal."""

from __future__ import annotations

import shlex

import pytest

from service.commands.remedies import REMEDIES, detail_of, remedies_of, remedy_of
from service.errors import GalleryNotFoundError, InvalidRequestError, SubjectNotFoundError, all_errors


@pytest.mark.parametrize("name", ["staff", "o'brien", 'o"brien', "a b; rm -rf ~", "\\n{gallery}"])
def test_names_are_taken_from_the_detail_as_words_of_a_shell(name: str) -> None:
    problem = SubjectNotFoundError(f"there is no subject 'x' in gallery {name!r}").document()
    assert shlex.quote(name) in remedy_of(problem)
    assert "GALLERY" in remedy_of({"code": "subject_not_found", "detail": "gone"})


def test_a_remedy_for_its_occasion_stays() -> None:
    assert "--help" in remedy_of(InvalidRequestError("x").document())
    assert remedy_of(InvalidRequestError("x", remedy="Do this.").document()) == "Do this."
    assert remedy_of({"code": "invalid_key", "remedy": "Copy it again."}) == "Copy it again."


def test_no_remedy_speaks_to_those_who_write_requests() -> None:
    """But for what no command asks for."""
    for error in all_errors():
        told = remedy_of({"code": error.code, "remedy": error.remedy, "detail": "x"})
        assert "repeat the request" not in told, error
        assert "/docs for" not in told, error
        assert "GET ..." not in told, error
    assert all(remedy.format(gallery="g", subject="s") for remedy in REMEDIES.values())


def test_each_code_is_told_once() -> None:
    problems = [GalleryNotFoundError("there is no gallery 'a'").document(), *[{"code": "low_quality"}] * 3]
    assert [line.partition(":")[0] for line in remedies_of(problems)] == ["gallery_not_found", "low_quality"]
    assert remedies_of([{"code": "of_no_remedy"}]) == []


def test_fields_go_by_their_names() -> None:
    told = detail_of({"code": "invalid_request", "detail": "path.job: wrong; body.name: wrong; a: path.b"})
    assert told == "job: wrong; name: wrong; a: path.b"
    assert detail_of({"code": "other", "detail": "path.job"}) == "path.job"
