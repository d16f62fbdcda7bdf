"""Start and stop of the service: imports, failing starts, and closing of all resources."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import closing
from functools import partialmethod
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
import sqlalchemy as sa
from numpy.typing import NDArray

from kith import Kith, KithClientError
from service import wiring
from service.app import create_app
from service.cli.terminal import EXIT_FAILED, EXIT_USAGE
from service.core.errors import SettingsError, StorageError
from service.domain.gallery import GallerySettings
from service.index.follower import Followers
from service.jobs.runner import Runner
from service.operations.transfers import Transfers
from service.risk.gallery_risks import GalleryRisks
from service.server import embedded
from service.settings import OTHERS, Settings, load_settings
from service.storage.audit.writer import AuditWriter
from service.storage.db.file_system import ACCOUNT_REMEDY
from service.storage.repositories.store import Store
from tests.conftest import ROOT, jpeg
from tests.databases import TEXT, engine_of, open_database
from tests.networks import color_network, scrfd_network
from tests.postgres import Postgres

STARTS = [
    {
        # Help and completion of the command line.
        "import service.cli.main": "numpy cv2 faiss onnxruntime openvino sqlalchemy fastapi pydantic",
        "import service.server": "alembic kith.client matplotlib onnx scipy.optimize torch",
    },
    {"import kith.client": "cv2 torch sqlalchemy faiss onnx fastapi scipy PIL numpy service"},
    # A new database and one of this version need no upgrade.
    {"from tests.databases import open_database; [open_database(URL).close() for _ in range(2)]": "alembic"},
]


@pytest.mark.parametrize("steps", STARTS)
def test_large_packages_are_imported_when_they_are_used(tmp_path: Path, steps: dict[str, str]) -> None:
    program = f"import sys\nURL = 'sqlite:///{tmp_path / 'kith.db'}'\n"
    for step, absent in steps.items():
        program += f"{step}\nprint([name for name in {absent.split()} if name in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()) == {"[]"}


class FailedError(Exception):
    pass


class Milvus:
    """Milvus engine that fails to start."""

    def __init__(self, closed: list[str]) -> None:
        self._closed = closed

    async def __aenter__(self) -> None:
        raise FailedError

    async def __aexit__(self, *_: object) -> None:
        raise AssertionError("what failed to start is not left")

    def close(self) -> None:
        self._closed.append("Milvus")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of closed resources, in order."""
    names = list[str]()

    def noted(self: object, closing: Callable[..., object], *arguments: object) -> object:
        names.append(type(self).__name__)
        return closing(self, *arguments)

    for each in (Followers, GalleryRisks, Store, Transfers, AuditWriter, Runner):
        close = "close" if hasattr(each, "close") else "__aexit__"
        monkeypatch.setattr(each, close, partialmethod(noted, getattr(each, close)))
    return names


OPENED = ["Store", "Followers", "GalleryRisks", "Transfers", "AuditWriter", "Runner"]


@pytest.mark.parametrize(
    ("failing", "opened"),
    [
        ("Followers", OPENED[:1]),
        ("open_milvus", ["Store", "Milvus"]),
        ("Backend", OPENED[:5]),
        ("nothing before it serves", OPENED),
    ],
)
def test_a_start_that_fails_closes_what_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: list[str], failing: str, opened: list[str]
) -> None:
    def fail(*arguments: object, **named: object) -> Milvus:
        if failing == "open_milvus":
            return Milvus(closed)
        raise FailedError

    async def main() -> None:
        app = create_app(load_settings(data_dir=tmp_path, log_level="ERROR"))
        async with app.router.lifespan_context(app):
            raise FailedError

    if hasattr(wiring, failing):
        monkeypatch.setattr(wiring, failing, fail)
    with pytest.raises(FailedError):
        asyncio.run(main())
    assert closed == opened[::-1]


COMMANDS = """
import os, signal, sys
import service.server
from service.cli.main import main
for folder, words, environment in CASES:
    if not os.fork():
        for descriptor in (1, 2):
            os.dup2(os.open(folder + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.chdir(folder)
        signal.alarm(60)  # ends what serves, instead of failing
        os.environ.update(environment)
        sys.argv[1:] = words
        main()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
Command = tuple[Path, list[str], dict[str, str]]
"""Folder, words and environment."""


def run_all(*commands: Command) -> list[tuple[int, str]]:
    """Run commands in processes of their own, after one start; return their exit statuses and what they printed.

    File permissions apply to them, also for root.
    """
    restricted = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KITH_")}
    cases = [(str(folder), words, {"KITH_PORT": "0", "COLUMNS": "400"} | env) for folder, words, env in commands]
    for folder, *_ in commands:
        folder.mkdir(exist_ok=True)
    program = [*restricted, sys.executable, "-c", f"CASES = {cases!r}\n{COMMANDS}"]
    done = subprocess.run(program, cwd=ROOT, env=inherited, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    printed = [Path(f"{folder}.log").read_text() for folder, *_ in commands]
    assert not any("Traceback" in text for text in printed)
    return list(zip(map(int, done.stdout.split()), printed, strict=True))


def test_a_start_that_fails_leaves_no_data_behind(tmp_path: Path) -> None:
    write_pack(tmp_path / "pack")
    refused = {
        f"KITH_API_KEY=guessable{22 * 'x'}": ["fewer than 32 characters"],
        "KITH_MASTER_KEY_FILE=absent": ["the master key cannot be read from absent"],
        "KITH_RUNTIME=AbsentExecutionProvider": ["AbsentExecutionProvider is not in this onnxruntime"],
        f"KITH_PACK={tmp_path / 'pack'}": ["must be finite"],
        "KITH_DATABASE_URL=sqlite:////proc/kith.db": ["KITH_DATA_DIR"],
        "KITH_DATA_DIR=/proc/data": ["KITH_DATA_DIR"],
        # All wrong variables are named at once.
        "KITH_PORT=-1 KITH_DEVISE=cpu KITH_MAX_IMAGE=1": [
            "KITH_PORT: Input should",
            "KITH_DEVICE?",
            "KITH_MAX_IMAGES?",
        ],
    }
    folders = [tmp_path / str(number) for number in range(len(refused))]
    settings = [dict(each.split("=", 1) for each in text.split()) for text in refused]
    ran = run_all(*((folder, ["serve"], each) for folder, each in zip(folders, settings, strict=True)))
    for folder, said, (status, printed) in zip(folders, refused.values(), ran, strict=True):
        assert status in (EXIT_USAGE, EXIT_FAILED) and all(each in printed for each in said)
        # No request was sent that could be repeated with an Idempotency-Key.
        assert "Idempotency" not in printed and "guessable" not in printed
        assert list(folder.iterdir()) == []


def write_pack(folder: Path) -> None:
    """Write a pack whose recognizer is unusable; tests/models/vision/test_output_check.py has all that is refused."""
    folder.mkdir()
    scrfd_network(folder / "detector.onnx")
    color_network(folder / "recognizer.onnx", factor=float("nan"))
    tasks = {
        "detection": {"file": "detector.onnx"},
        "recognition": {"file": "recognizer.onnx", "embedding_dimension": 64},
    }
    manifest = {"manifest_version": 2, "model_id": "small", "license": "MODEL.LICENSE", "tasks": tasks}
    (folder / "manifest.json").write_text(json.dumps(manifest))


REFUSED_FILES = (
    ("data/kith.db", 0o644, "serve"),
    ("data/kith.db", 0o600, "doctor"),
    ("data/kith.db-shm", 0o600, "serve"),
    ("data", 0o755, "serve"),
    ("data/spool", 0o711, "serve"),
    ("key", 0o600, "doctor"),
)


def test_a_start_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    """To files of another user. Without root, the owner may not write them either."""
    commands, paths = list[Command](), list[Path]()
    for number, (name, mode, command) in enumerate(REFUSED_FILES):
        folder, path = tmp_path / str(number), tmp_path / str(number) / name
        open_database(f"sqlite:///{folder / 'data' / 'kith.db'}").close()
        if name == "data/spool":
            path.mkdir()
        elif not path.exists():
            path.write_text(f"{TEXT}\n" if name == "key" else "")
        key = {"KITH_MASTER_KEY_FILE": str(path)} if name == "key" else {"KITH_MASTER_KEY": TEXT}
        commands.append((folder, [command], {"KITH_DATA_DIR": str(folder / "data"), **key}))
        paths.append(path)
        path.chmod(mode if os.geteuid() == 0 else mode & 0o555)
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
    try:
        ran = run_all(*commands)
    finally:
        for path in paths:
            path.chmod(0o755)
    remedy = "KITH_DATA_DIR and KITH_DATABASE_URL to the user that runs Kith (chown)"
    for (name, _, command), path, (status, printed) in zip(REFUSED_FILES, paths, ran, strict=True):
        assert (status, str(path) in printed) == (1 if command == "doctor" else EXIT_FAILED, True), name
        assert remedy in printed or command == "doctor"


def test_a_server_whose_database_file_becomes_read_only_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    refused = set[str]()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in refused and access(path, mode))
    with embedded(load_settings(data_dir=tmp_path, log_level="ERROR")) as url:
        assert httpx.get(f"{url}/readyz").status_code == 200
        refused.add(str(tmp_path / "kith.db"))
        answer = httpx.get(f"{url}/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
        assert "kith.db" in answer.json()["detail"]
        assert "chown" in answer.json()["remedy"]
        refused.clear()
        (tmp_path / "kith.db").rename(tmp_path / "moved.db")
        assert "the database is gone" in httpx.get(f"{url}/readyz").json()["detail"]
        (tmp_path / "moved.db").rename(tmp_path / "kith.db")
        assert httpx.get(f"{url}/readyz").status_code == 200


def test_a_postgresql_account_without_rights_is_refused(postgres: Postgres) -> None:
    name = f"kith_{uuid.uuid4().hex}"
    owner = postgres.create(name)
    open_database(owner).close()
    account, plain = owner.replace("kith@", f"{name}@"), engine_of(owner)

    def run(statement: str) -> None:
        with plain.begin() as connection:
            connection.execute(sa.text(statement))

    def refused(match: str) -> None:
        with pytest.raises(StorageError, match=match) as raised:
            open_database(account)
        assert raised.value.remedy == ACCOUNT_REMEDY

    try:
        run(f"CREATE ROLE {name} LOGIN")
        run(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
        refused("permission denied")
        run(f"GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {name}")
        with closing(open_database(account)) as database:
            database.check_writable()
            with pytest.raises(StorageError, match="permission denied for sequence") as raised:
                Store(database).galleries.create("g", "f" * 32, 8, GallerySettings())
            assert raised.value.remedy == ACCOUNT_REMEDY
            run(f"ALTER ROLE {name} SET default_transaction_read_only TO on")
            database.engine.dispose()
            with pytest.raises(StorageError, match="standby"):
                database.check_writable()
        refused("read-only transaction")
    finally:
        run(f"DROP OWNED BY {name}")
        run(f"DROP ROLE {name}")
        plain.dispose()
        postgres.drop(name)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("KITH_MAX_IMAGE=1", "KITH_MAX_IMAGE{place} is not a variable of Kith: did you mean KITH_MAX_IMAGES?"),
        ("kith_max_image=1", "kith_max_image{place} is not a variable of Kith: did you mean KITH_MAX_IMAGES?"),
        ("KITH_ULR=http://127.0.0.1:9", "did you mean KITH_URL?"),
        ("kith_url=http://127.0.0.1:9", "kith_url{place} is not a variable of Kith: did you mean KITH_URL?"),
        ("KITH_ZZ=1", "KITH_ZZ{place} is not a variable of Kith: remove it; docs/settings.md lists all names"),
        ("KITH_HTTP_PORT=8000", "KITH_HTTP_PORT{place} is not a variable of Kith: did you mean KITH_PORT?"),
        ("KITH_PORT=tcp://10.0.0.1:8000", "Kubernetes set it to the address of a Service named kith: set en"),
    ],
)
def test_a_variable_that_nothing_reads_stops_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, said: str
) -> None:
    name, _, value = variable.partition("=")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(SettingsError, match=re.escape(said.format(place=""))):
        patch.setenv(name, value)
        load_settings()
    (tmp_path / ".env").write_text(f"KITH_DETAIL=medium\nexport {variable}\n", "utf-8-sig")
    with pytest.raises(SettingsError, match=re.escape(said.format(place=" in .env"))):
        load_settings()
    for line, wrong in (
        ("KITH_MAX_IMAGES", "line 2 of .env has no value"),
        ("kith_max_images: 3", "line 2 of .env has no value"),
        ("KITH_RUNTIME=\xe9", "cannot be read"),
    ):
        (tmp_path / ".env").write_text(f"OTHER PROGRAM\n{line}\n", "latin-1")
        with pytest.raises(SettingsError, match=wrong):
            load_settings()


def test_variables_of_services_and_of_other_programs_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    links = {
        "KITH_SERVICE_HOST": "10.0.0.1",
        "KITH_SERVICE_PORT_HTTP": "8000",
        "KITH_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "KITH_PORT_8000_TCP_ADDR": "10.0.0.1",
        "KITH_POSTGRES_SERVICE_HOST": "10.0.0.2",
        "KITH_POSTGRES_PORT": "tcp://10.0.0.2:5432",
        "KITH_POSTGRES_PORT_5432_TCP_ADDR": "10.0.0.2",
    }
    others = {f"KITH_{name}": "x" for names in OTHERS.values() for name in names}
    for name, value in (links | others | {"KITH_PORT": "9", "kith_max_images": "3"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".env").write_text("\ufeffKITH_DETAIL=high\nKITH_POSTGRES_PASSWORD=x\n")
    settings = load_settings()
    assert (settings.port, settings.max_images, settings.detail) == (9, 3, "high")


def test_every_variable_that_the_project_names_is_known() -> None:
    folders = [ROOT / name for name in ("bench", "docker", "docs", "kith", "models", "service", "training", "tools")]
    files = [ROOT / "Makefile", ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*"))]
    texts = [path.read_text(errors="replace") for path in files if path.is_file() and "__pycache__" not in path.parts]
    texts += [
        read
        for path in (ROOT / "tests").rglob("*.py")
        for read in re.findall(r'environ\.get\("KITH_\w+"', path.read_text())
    ]
    named = {name for text in texts for name in re.findall(r"\bKITH_[A-Z0-9_]*[A-Z0-9]\b", text)}
    prefixes = {"KITH_MILVUS"}  # KITH_MILVUS_...
    settings = {f"KITH_{name.upper()}" for name in Settings.model_fields}
    assert named - prefixes == settings | {f"KITH_{name}" for names in OTHERS.values() for name in names}


def test_it_detects_embeds_and_verifies_without_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8]
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    photo, key = jpeg(astronaut), "k" * 32
    settings = load_settings(stateless=True, data_dir=tmp_path / "data", api_key=key, log_level="WARNING")
    with embedded(settings) as url, Kith(url, api_key=key) as kith:
        (face,) = kith.embed(photo).images[0].faces
        assert kith.verify(photo, np.array(face.embedding)).outcome == "same"
        assert httpx.get(f"{url}/readyz").status_code == 200
        for path in ("/v1/galleries", "/v1/keys", "/console", "/"):
            answer = httpx.get(url + path, headers={"X-API-Key": key})
            assert answer.status_code == 404, path
        with pytest.raises(KithClientError) as missing:
            kith.create_gallery("staff")
        assert missing.value.status == 404
        paths = httpx.get(f"{url}/openapi.json").json()["paths"]
        assert {"/v1/detect", "/v1/embed", "/v1/verify"} < set(paths)
        assert not any("galleries" in path for path in paths)
        loaded = re.findall(r'(?:src|href)="([^"]+)"', httpx.get(f"{url}/docs").text)
        assert [httpx.get(f"{url}/{path}").status_code for path in loaded] == [200] * 4
    assert not (tmp_path / "data").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("setting", ["database_url", "milvus_uri"])
def test_a_place_to_store_data_is_refused(setting: str) -> None:
    with pytest.raises(SettingsError, match=f"unset KITH_{setting.upper()}"):
        load_settings(stateless=True, **{setting: "http://127.0.0.1:1"})
