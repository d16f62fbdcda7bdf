"""Documents are consistent and agree with the code: links and anchors resolve, the index lists every page, every
setting, error and command is documented, every documented one exists, and generated parts are up to date.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kith.errors import UNKNOWN_CODE
from models.errors import PULL_REMEDIES
from service.cli.main import app
from service.core.errors import KindError, all_errors
from service.settings import Settings
from tests.conftest import ROOT
from tools import cli_reference, reference_tables
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
    counts: Counter[str] = Counter()
    made = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        made.add(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
        counts[anchor] += 1
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


def test_named_files_exist() -> None:
    """Files and modules that pages name in code style, or the code in comments. Names in capitals are placeholders."""
    folders = "tests|service|models|training|bench|docker|requirements|tools"
    named = re.compile(rf"`((?:{folders})/[\w./-]+)`|(?<![/\w])(bench/\w+\.py)|-m ((?:bench|tools)\.\w+)")
    packages = [file for folder in ("kith", "models", "service", "training") for file in ROOT.glob(f"{folder}/**/*.py")]
    wrong = set()
    for file in (page for page in [*PAGES, *packages] if page.parent.name != "results"):
        for path in map("".join, named.findall(file.read_text())):
            module = f"{path.replace('.', '/')}.py"
            if not (ROOT / path).exists() and not (ROOT / module).exists() and not re.search("[A-Z]{4}", path):
                wrong.add(path)
    assert wrong <= {"docker/.env"}, "the reader creates it"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text())}
    pages = {path for path in (ROOT / "docs").glob("*.md") if path != index}
    assert pages <= linked


def test_each_danger_that_is_stopped_names_its_tests() -> None:
    section = (ROOT / "SECURITY.md").read_text().partition("## Threats")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for who, what, shown in rows:
        assert what.strip().startswith("Nothing:") or "tests/" in shown, who


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
            for _, said in groupby(lexer, lambda word: set(word) <= set(";|&()")):
                words = list(dropwhile(re.compile(r"\w+=").match, said))
                if words and words[0][0] not in ";|&()-" and words[0].rpartition("/")[2] in PROGRAMS:
                    yield [words[0].rpartition("/")[2], *words[1:]]


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


def rows(document: str) -> list[list[str]]:
    lines = (ROOT / "docs" / document).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


GENERATED: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(reference_tables.TABLES, reference_tables.with_table),
    **dict.fromkeys(cli_reference.DOCUMENTS, cli_reference.with_reference),
}


@pytest.mark.parametrize("document", GENERATED)
def test_generated_parts_are_up_to_date(document: str) -> None:
    """Run python -m tools.reference_tables and python -m tools.cli_reference to update them."""
    assert (ROOT / "docs" / document).read_text() == GENERATED[document](document)


def test_every_setting_and_error_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())
    assert all(error.remedy and error.title for error in all_errors())
    assert {error.code for error in all_errors()} >= reference_tables.LOCAL


def test_every_code_is_raised_and_every_raised_code_is_described() -> None:
    text = "".join(path.read_text() for path in sorted((ROOT / "service").rglob("*.py")))
    of_classes = set(re.findall(r'^    code = "([a-z_]+)"', text, re.MULTILINE))
    patterns = {error.__name__: error.pattern for error in KindError.__subclasses__()}
    kinds = re.findall(rf'\b({"|".join(patterns)})\(\s*"([a-z_]+)"', text)
    raised = {patterns[name].format(kind) for name, kind in kinds} | {"gallery_not_found", "subject_not_found"}
    assert of_classes | raised == {error.code for error in all_errors()}


def test_errors_of_the_client_and_the_command_line() -> None:
    """Errors that no server sends."""
    documented = {row[0].strip("`") for row in rows("errors.md") if len(row) == 2}
    folders = (ROOT / "kith", ROOT / "service" / "cli", ROOT / "service" / "cli" / "commands")
    places = [path for folder in folders for path in folder.glob("*.py")]
    named = {
        code for path in places for code in re.findall(r'(?:"code": |local_error\(\s*)"([a-z_]+)"', path.read_text())
    }
    assert documented == (named | {UNKNOWN_CODE, "pack"}) - {error.code for error in all_errors()}


def test_audited_events() -> None:
    """Events in calls, and recorded events in constants."""
    documented = set(re.findall(r"^\| `([a-z_]+)`", reference_tables.audit_table(), re.MULTILINE))
    recording = {"record", "note", "Entry", "Entry.about", "_entry", "self._record", "entry_of", "self._erase"}
    recorded: set[str] = set()
    constants: set[str] = set()
    for text in (path.read_text() for path in (ROOT / "service").rglob("*.py")):
        constants |= set(re.findall(r'^[A-Z_]+: Final = "([a-z_]+)"', text, re.MULTILINE))
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            if (called := ast.unparse(call.func)) in recording:
                given = call.args[:1] if called == "self._erase" else call.args
                values = [each.value for each in given if isinstance(each, ast.Constant)]
                recorded |= {value for value in values if isinstance(value, str) and re.fullmatch("[a-z_]+", value)}
    assert recorded - {"failed"} <= documented <= recorded | constants, "failed is an outcome"


def test_what_pulling_a_pack_may_end_in() -> None:
    assert set(PULL_REMEDIES) <= {row[0].strip("`") for row in rows("models.md")}
