"""Security promises name existing evidence, and stored data is documented table by table."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command

from service.cli.main import app
from service.storage.db.tables import metadata
from tests.conftest import ROOT

DOCUMENTS = ["SECURITY.md", "docs/privacy.md", "docs/faults.md", "docs/deployment.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_evidence_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`((?:tests|service|models|bench|docker|requirements)/[\w./-]+)`", text))
    named.discard("docker/.env")  # the reader creates it
    # Names in capitals are placeholders.
    assert [path for path in named if not (ROOT / path).exists() and not re.search("[A-Z]{4}", path)] == []
    folder = (ROOT / document).parent
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [path for path in linked if not (folder / path).exists()] == []


def test_each_danger_that_is_stopped_names_its_tests() -> None:
    section = (ROOT / "SECURITY.md").read_text().partition("## Threats")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for who, what, shown in rows:
        assert what.strip().startswith("Nothing:") or "tests/" in shown, who


def test_every_table_is_documented() -> None:
    section = (ROOT / "docs" / "privacy.md").read_text().partition("## What is stored")[2].partition("Outside of")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    told = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(told) == sorted(metadata.tables)


@pytest.mark.parametrize("document", ["SECURITY.md", "docs/privacy.md"])
def test_commands_exist(document: str) -> None:
    command = get_command(app)
    text = (ROOT / document).read_text()
    for words in set(re.findall(r"`kith ((?:[a-z]+ ?)+)", text)):
        found = command
        for word in words.split():
            known = getattr(found, "commands", {})
            assert word in known, f"{document}: kith {words}"
            found = known[word]
            if not hasattr(found, "commands"):
                break
