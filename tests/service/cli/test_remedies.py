"""Remedies at the terminal name commands and options, not API requests."""

from __future__ import annotations

import shlex

import pytest

from service.cli.remedies import REMEDIES, detail_for, remedy_for, remedy_lines
from service.core.error_catalog import all_errors
from service.core.errors import GalleryNotFoundError, InvalidRequestError, SubjectNotFoundError


@pytest.mark.parametrize("name", ["staff", "o'brien", 'o"brien', "a b; rm -rf ~", "\\n{gallery}"])
def test_names_in_remedies_are_quoted_for_the_shell(name: str) -> None:
    problem = SubjectNotFoundError(f"there is no subject 'x' in gallery {name!r}").document()
    assert shlex.quote(name) in remedy_for(problem)
    assert "GALLERY" in remedy_for({"code": "subject_not_found", "detail": "gone"})


def test_a_remedy_specific_to_the_request_is_kept() -> None:
    assert "--help" in remedy_for(InvalidRequestError("x").document())
    assert remedy_for(InvalidRequestError("x", remedy="Do this.").document()) == "Do this."
    assert remedy_for({"code": "invalid_key", "remedy": "Copy it again."}) == "Copy it again."


def test_no_remedy_describes_api_requests() -> None:
    for error in all_errors():
        remedy = remedy_for({"code": error.code, "remedy": error.remedy, "detail": "x"})
        assert "repeat the request" not in remedy, error
        assert "/docs for" not in remedy, error
        assert "GET ..." not in remedy, error
    assert all(remedy.format(gallery="g", subject="s") for remedy in REMEDIES.values())


def test_each_error_code_gets_one_line() -> None:
    problems = [GalleryNotFoundError("there is no gallery 'a'").document(), *[{"code": "low_quality"}] * 3]
    assert [line.partition(":")[0] for line in remedy_lines(problems)] == ["gallery_not_found", "low_quality"]
    assert remedy_lines([{"code": "without_remedy"}]) == []


def test_fields_are_named_without_the_part_of_the_request() -> None:
    detail = detail_for({"code": "invalid_request", "detail": "path.job: wrong; body.name: wrong; a: path.b"})
    assert detail == "job: wrong; name: wrong; a: path.b"
    assert detail_for({"code": "other", "detail": "path.job"}) == "path.job"
