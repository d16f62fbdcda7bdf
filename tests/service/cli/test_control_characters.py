"""Legacy names with unusual characters are read unchanged and displayed as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kith import Kith
from service.cli.terminal import print_json, print_line, print_note
from service.cli.words import CONTROL_PATTERN
from service.settings import Settings
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.service.cli.conftest import Program

NAME = "Ada\x1b[2J\nerror: \x9b5m\u202eadA"
SHOWN = "Ada\ufffd[2J"
TAG = "\x1b]0;title\x07"
WRITTEN = "\u0645\u06cc\u200c\u062e 山田\u3000太郎 O\u2019Neil \u200f\u05d0 👩\u200d🔬"
"""What names are written with."""


def test_stored_names_are_read_as_they_are_and_shown_as_text(
    run: Program, kith: Kith, gallery: str, settings: Settings, photos: dict[str, Path]
) -> None:
    kith.enroll(gallery, "ada", photos["eileen"])
    with closing(open_database(settings.sql_url)) as database:
        store = Store(database)
        store.subjects.put(store.galleries.get(gallery), "ada", NAME, {"k": NAME}, [TAG])
    assert (kith.subject(gallery, "ada").name, kith.subject(gallery, "ada").tags) == (NAME, [TAG])
    identify = ("identify", photos["eileen"], "--draw", "out.png")
    for command in (("subject", "list"), ("subject", "show", "ada"), identify):
        shown = run(*command, "-g", gallery)
        assert SHOWN in shown
        assert not CONTROL_PATTERN.search((shown + run.stderr).replace("\n", ""))
        told = run(*command, "-g", gallery, "--json")
        assert not CONTROL_PATTERN.search(told.replace("\n", ""))
        assert NAME in values(json.loads(told))
    with Image.open(run.folder / "out.png") as drawn:
        assert min(drawn.size) >= 1280


def values(document: Any) -> Iterator[Any]:
    """Yield the scalar values of a JSON document, at any depth."""
    if isinstance(document, dict | list):
        for each in document.values() if isinstance(document, dict) else document:
            yield from values(each)
    else:
        yield document


def test_messages_are_text_in_lines_of_our_own(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("one\ntwo\x1b[2J")
    print_line(WRITTEN)
    print_note("three\x9b")
    print_json({"name": "\x9b\u202e\x7f\n", "list": ["é"]})
    printed = capsys.readouterr()
    assert printed.out.startswith(f"one\ntwo\ufffd[2J\n{WRITTEN}\n")
    assert printed.err == "three\ufffd\n"
    document = printed.out.partition(f"{WRITTEN}\n")[2]
    assert json.loads(document) == {"name": "\x9b\u202e\x7f\n", "list": ["é"]}
    assert document.isascii() is False
    assert not CONTROL_PATTERN.search(document.replace("\n", ""))
