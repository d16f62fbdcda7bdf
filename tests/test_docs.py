"""Documents and code agree: every setting, error and command is documented, and every documented one exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from importlib.metadata import packages_distributions

import httpx2 as httpx
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


@pytest.mark.parametrize("document", reference_tables.TABLES)
def test_generated_tables(document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    assert text == reference_tables.with_table(document), "run python -m tools.reference_tables"


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


@pytest.mark.parametrize("document", cli_reference.DOCUMENTS)
def test_every_command_and_option_is_in_the_reference(document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    assert text == cli_reference.with_reference(document), "run python -m tools.cli_reference"


def test_packs_and_what_pulling_them_may_end_in() -> None:
    documented = {row[0].strip("`") for row in rows("models.md")}
    codes = set(PULL_REMEDIES)
    text = (ROOT / "docs" / "models.md").read_text()
    assert codes <= documented
    assert all(name.removeprefix("buffalo") in text for name in read_catalog())
    names = set(typer.main.get_command(models_app).list_commands(typer.Context(typer.main.get_command(models_app))))  # type: ignore[attr-defined]
    assert set(re.findall(r"kith models ([a-z]+)", text)) == names


def test_every_route_is_documented_with_its_problem(server: str) -> None:
    document = httpx.get(f"{server}/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert "default" in operation["responses"], where
            if method == "post" and not path.endswith(
                ("/calibrate", "/roll-back", "/test", "/replay", "/cancel")
            ):  # which need nothing but a name
                assert operation["requestBody"]["content"], where
                assert operation.get("description"), where
    bodies = [o for m in document["paths"].values() for o in m.values() if "multipart/form-data" in str(o)]
    assert len(bodies) == 6
    for operation in bodies:
        content = operation["requestBody"]["content"]["application/json"]
        assert content["example"]
        name = content["schema"]["$ref"].rsplit("/", 1)[1]
        assert set(content["example"]) <= set(document["components"]["schemas"][name]["properties"])
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references <= set(document["components"]["schemas"])


@pytest.mark.parametrize(
    ("target", "given", "said"),
    [
        ("fuzz", [], ["--minutes 10", "int(20 * 10)"]),
        ("soak", [], ["--minutes 30"]),
        ("fuzz", ["MINUTES=5"], ["--minutes 5", "int(20 * 5)"]),
        ("soak", ["MINUTES=5"], ["--minutes 5"]),
    ],
)
def test_make_targets_announce_their_duration(target: str, given: list[str], said: list[str]) -> None:
    asked = ["make", "--dry-run", "--old-file=.venv/.installed", target, *given]
    environment = {name: value for name, value in os.environ.items() if name not in ("MINUTES", "MAKEFLAGS")}
    done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert all(words in done.stdout for words in said), done.stdout


def test_only_this_distribution_provides_its_import_names() -> None:
    provided = packages_distributions()
    for name in ("models", "service", "training"):
        assert set(provided[name]) == {"kith-face"}
