"""Legacy names with unusual characters are read unchanged and displayed as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from service.cli.terminal import print_json, print_line, print_note
from service.cli.words import CONTROL_PATTERN
from service.resources import open_own_database
from service.server import embedded
from service.settings import load_settings
from service.storage.repositories.store import Store
from tests.conftest import jpeg
from tests.service.cli.test_commands import kith_command

NAME = "Ada\x1b[2J\nerror: \x9b5m\u202eadA"
SHOWN = "Ada\ufffd[2J"
TAG = "\x1b]0;title\x07"
WRITTEN = "\u0645\u06cc\u200c\u062e 山田\u3000太郎 O\u2019Neil \u200f\u05d0 👩\u200d🔬"
"""What names are written with."""


@pytest.fixture
def of_old(tmp_path: Path, astronaut: NDArray[Any]) -> Iterator[str]:
    """A server with a gallery in which ada has such a name, and a photo of her."""
    settings = load_settings(data_dir=tmp_path / "data", log_level="WARNING")
    (tmp_path / "ada.jpg").write_bytes(jpeg(astronaut))
    with embedded(settings) as url, Kith(url) as kith:
        kith.create_gallery("g", risk={"threshold": 0.3})
        kith.enroll("g", "ada", tmp_path / "ada.jpg")
        with closing(open_own_database(settings)) as database:
            store = Store(database)
            store.subjects.put(store.galleries.get("g"), "ada", NAME, {"k": NAME}, [TAG])
        yield url


def test_stored_names_are_read_as_they_are_and_shown_as_text(of_old: str, tmp_path: Path) -> None:
    with Kith(of_old) as kith:
        assert (kith.subject("g", "ada").name, kith.subject("g", "ada").tags) == (NAME, [TAG])
    for command in (("subject", "list"), ("subject", "show", "ada"), ("identify", "ada.jpg", "--draw", "out.png")):
        ran = kith_command(*command, "-g", "g", "--url", of_old, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert SHOWN in ran.stdout
        assert not CONTROL_PATTERN.search((ran.stdout + ran.stderr).replace("\n", ""))
        told = kith_command(*command, "-g", "g", "--url", of_old, "--json", cwd=tmp_path).stdout
        assert not CONTROL_PATTERN.search(told.replace("\n", ""))
        assert NAME in values(json.loads(told))
    with Image.open(tmp_path / "out.png") as drawn:
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
