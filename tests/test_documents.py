"""Documents are consistent: links and anchors resolve, the index lists every page, commands in code blocks exist with
their options, and generated parts are up to date.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from service.cli.main import app
from service.storage.db.tables import metadata
from tests.conftest import ROOT
from tools.rest_reference import TARGET, reference
from training.cli.commands import app as train_app

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "training/*/README.md", "models/packs/*/*.md", "bench/results/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS: dict[str, Any] = {"kith": typer.main.get_command(app), "kith-train": typer.main.get_command(train_app)}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    made: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = base = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while anchor in made:
            number += 1
            anchor = f"{base}-{number}"
        made.add(anchor)
    return made


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = COMMENT.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    wrong = []
    for target in LINK.findall(text):
        if re.match("[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(target)
    assert wrong == []


def test_benchmarks_that_code_and_pages_name_exist() -> None:
    named = re.compile(r"(?<![/\w])bench/([a-z_]+)\.py|-m bench\.([a-z_]+)")
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    files += [file for folder in ("kith", "models", "service", "training") for file in ROOT.glob(f"{folder}/**/*.py")]
    modules = {file.stem for file in (ROOT / "bench").glob("*.py")}
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for names in named.findall(file.read_text(encoding="utf-8"))
        for name in names
        if name and name not in modules
    }
    assert not missing


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text())}
    pages = {path for path in (ROOT / "docs").glob("*.md") if path != index}
    assert pages <= linked


def test_the_rest_reference_is_up_to_date() -> None:
    """Run python -m tools.rest_reference to update the page."""
    assert TARGET.read_text(encoding="utf-8") == reference()


def test_named_evidence_exists() -> None:
    """Names in capitals are placeholders."""
    missing = set()
    for page in ("SECURITY.md", "docs/privacy.md", "docs/faults.md", "docs/deployment.md"):
        text = (ROOT / page).read_text()
        named = set(re.findall(r"`((?:tests|service|models|bench|docker|requirements)/[\w./-]+)`", text))
        missing |= {path for path in named if not (ROOT / path).exists() and not re.search("[A-Z]{4}", path)}
    assert missing <= {"docker/.env"}, "the reader creates it"


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


def commands(page: Path) -> Iterator[list[str]]:
    """Yield each call of the project's programs in shell blocks, and each command that the text names."""
    for named in re.findall(r"`(kith(?: [a-z]+)+)[ `]", FENCE.sub("", page.read_text(encoding="utf-8"))):
        yield named.split()
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language != "sh":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if not set(word) <= set(";|&()"):
                    words.append(word)
                    continue
                while words and re.match(r"\w+=", words[0]):
                    words.pop(0)
                if words and words[0][0] != "-" and words[0].rpartition("/")[2] in PROGRAMS:
                    yield [words[0].rpartition("/")[2], *words[1:]]
                words = []


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=name)
def test_commands_exist_with_their_options(page: Path) -> None:
    for program, *words in commands(page):
        said = " ".join([program, *words])
        command = PROGRAMS[program]
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, said
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)}
        assert used <= known | {"--help", "--install-completion", "--show-completion"}, said
