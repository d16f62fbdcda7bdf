"""Documents are consistent and agree with the code: links and anchors resolve, the index lists every page, every
setting, error and command is documented, every documented one exists, and generated parts are up to date.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kith.errors import UNKNOWN_CODE
from models.errors import PULL_REMEDIES
from models.pack.catalog import read_catalog
from service.cli.commands.packs import app as models_app
from service.cli.main import app
from service.core.errors import KindError, all_errors
from service.risk.gallery_risks import THRESHOLD_MOVED
from service.settings import Settings
from service.storage.db.tables import metadata
from service.storage.repositories import strangers
from service.storage.repositories.subjects import DELETED_EVENT, MERGED_EVENT
from service.storage.repositories.templates import DELETED_EVENT as TEMPLATE_DELETED
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


def rows(document: str) -> list[list[str]]:
    lines = (ROOT / "docs" / document).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


GENERATED = {
    **dict.fromkeys(reference_tables.TABLES, reference_tables.with_table),
    **dict.fromkeys(cli_reference.DOCUMENTS, cli_reference.with_reference),
}


@pytest.mark.parametrize("document", GENERATED)
def test_generated_parts_are_up_to_date(document: str) -> None:
    """Run python -m tools.reference_tables and python -m tools.cli_reference to update them."""
    assert (ROOT / "docs" / document).read_text() == GENERATED[document](document)


def test_every_setting_and_error_is_described() -> None:
    documented = {name: {row[0].strip("`") for row in rows(name) if len(row) > 2} for name in reference_tables.TABLES}
    assert documented["settings.md"] == {f"KITH_{name.upper()}" for name in Settings.model_fields}
    assert all(field.description for field in Settings.model_fields.values())
    assert documented["errors.md"] == {error.code for error in all_errors()}
    assert all(error.remedy and error.title for error in all_errors())
    assert documented["errors.md"] >= reference_tables.LOCAL


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
    text = (ROOT / "docs" / "keys.md").read_text()
    table = text[text.index("| Event |") :].split("\n\n")[0]
    documented = set(re.findall(r"^\| `([a-z_]+)`", table, re.MULTILINE))
    recorded = {
        THRESHOLD_MOVED,
        MERGED_EVENT,
        DELETED_EVENT,
        TEMPLATE_DELETED,
        strangers.REMEMBERED,
        strangers.PROMOTED,
        strangers.MERGED,
    }
    for path in (ROOT / "service").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            name = ast.unparse(call.func)
            if name in ("record", "note", "Entry", "Entry.about", "_entry", "self._record", "entry_of", "self._erase"):
                constants = call.args[:1] if name == "self._erase" else call.args
                named = (each.value for each in constants if isinstance(each, ast.Constant))
                recorded |= {value for value in named if isinstance(value, str) and re.fullmatch("[a-z_]+", value)}
    assert documented == recorded - {"failed"}  # an outcome


def test_packs_and_what_pulling_them_may_end_in() -> None:
    documented = {row[0].strip("`") for row in rows("models.md")}
    codes = set(PULL_REMEDIES)
    text = (ROOT / "docs" / "models.md").read_text()
    assert codes <= documented
    assert all(name.removeprefix("buffalo") in text for name in read_catalog())
    names = set(typer.main.get_command(models_app).list_commands(typer.Context(typer.main.get_command(models_app))))  # type: ignore[attr-defined]
    assert set(re.findall(r"kith models ([a-z]+)", text)) == names


def test_only_this_distribution_provides_its_import_names() -> None:
    provided = packages_distributions()
    for name in ("models", "service", "training"):
        assert set(provided[name]) == {"kith-face"}
