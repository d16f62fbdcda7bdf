"""Documents and code agree: every setting, error and command is documented, and every documented one exists."""

from __future__ import annotations

import ast
import re
from importlib.metadata import packages_distributions

import pytest
import typer.main

from kith.errors import UNKNOWN_CODE
from models.errors import PULL_REMEDIES
from models.pack.catalog import read_catalog
from service.cli.commands.packs import app as models_app
from service.core.errors import KindError, all_errors
from service.risk.gallery_risks import THRESHOLD_MOVED
from service.settings import Settings
from service.storage.repositories import strangers
from service.storage.repositories.subjects import DELETED_EVENT, MERGED_EVENT
from service.storage.repositories.templates import DELETED_EVENT as TEMPLATE_DELETED
from tests.conftest import ROOT
from tools import cli_reference, reference_tables


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
