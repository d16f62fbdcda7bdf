"""Start and stop of the service: imports, failing starts, and closing of all resources."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import httpx2 as httpx
import numpy as np
import pytest
import sqlalchemy as sa
from numpy.typing import NDArray

from kith import Kith, KithClientError
from models.errors import PackError
from models.runtime.network import Engine
from service import wiring
from service.app import create_app
from service.cli.terminal import EXIT_FAILED, EXIT_USAGE
from service.core.errors import SettingsError, StorageError
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


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            "service.cli.main, service.server",
            ("alembic", "kith.client", "matplotlib", "onnx", "scipy.optimize", "torch"),
        ),
        # Help and completion of the command line.
        ("service.cli.main", ("numpy", "cv2", "faiss", "onnxruntime", "openvino", "sqlalchemy", "fastapi", "pydantic")),
        ("kith.client", ("cv2", "torch", "sqlalchemy", "faiss", "onnx", "fastapi", "scipy", "PIL", "numpy", "service")),
    ],
)
def test_large_packages_are_imported_when_they_are_used(modules: str, absent: tuple[str, ...]) -> None:
    program = f"import {modules}, sys; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_start_without_an_upgrade_does_not_import_alembic(tmp_path: Path) -> None:
    opening = f"for _ in range(2): open_database('sqlite:///{tmp_path / 'kith.db'}').close()"
    program = f"import sys\nfrom tests.databases import open_database\n{opening}\nprint('alembic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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

    def watch(name: str, close: str, each: type) -> None:
        closing = getattr(each, close)

        def noted(self: object, *arguments: object) -> object:
            names.append(name)
            return closing(self, *arguments)

        monkeypatch.setattr(each, close, noted)

    for each in (Followers, GalleryRisks, Store, Transfers):
        watch(each.__name__, "close", each)
    for task in (AuditWriter, Runner):
        watch(task.__name__, "__aexit__", task)
    return names


OPENED = ["Store", "Followers", "GalleryRisks", "Transfers", "AuditWriter", "Runner"]


@pytest.mark.parametrize(
    ("failing", "opened"),
    [
        ("Followers", OPENED[:1]),
        ("open_milvus", ["Store", "Milvus"]),
        ("AuditWriter", OPENED[:4]),
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


def served(tmp_path: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a command, by default ``kith serve``, with settings that it rejects."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KITH_")}
    environment = inherited | {"KITH_PORT": "0"} | settings
    command = [*restricted(), sys.executable, "-m", "service.cli.main", *(words or ["serve"])]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"KITH_HOST": "0.0.0.0"}, "without an API key"),  # noqa: S104
        ({"KITH_API_KEY": "guessable"}, "fewer than 32 characters"),
        ({"KITH_MASTER_KEY_FILE": "absent"}, "the master key cannot be read from absent"),
        ({"KITH_RUNTIME": "AbsentExecutionProvider"}, "AbsentExecutionProvider is not in this onnxruntime"),
        ({"KITH_PACK": "/nowhere"}, "/nowhere is not a directory"),
        ({"KITH_DATA_DIR": "/proc/data"}, "(storage_unavailable)"),
        ({"KITH_DATABASE_URL": "sqlite:////proc/kith.db"}, "(storage_unavailable)"),
    ],
)
def test_a_start_that_fails_leaves_no_data_behind(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    done = served(tmp_path, **settings)
    assert done.returncode != 0
    assert said in done.stderr
    assert "KITH_DATA_DIR" in done.stderr or "storage" not in said
    # No request was sent that could be repeated with an Idempotency-Key.
    assert not any(word in done.stderr for word in ("Traceback", "Idempotency", "guessable"))
    assert list(tmp_path.iterdir()) == []


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "recognizer": (lambda path: color_network(path, factor=float("nan")), "must be finite"),
    "detector": (lambda path: scrfd_network(path, bias=float("nan")), "not finite"),
    "liveness": (
        lambda path: color_network(path, ["n", 3, 80, 80], 1, declared=["n", 1], factor=1e6),
        "set live_class",
    ),
}
"""tests/models/vision/test_output_check.py has all that is refused."""


@pytest.mark.parametrize("engine", get_args(Engine))
@pytest.mark.parametrize("task", UNUSABLE)
def test_an_unusable_network_stops_the_start(tmp_path: Path, task: str, engine: str) -> None:
    pack, (write, said) = tmp_path / "pack", UNUSABLE[task]
    pack.mkdir()
    scrfd_network(pack / "detector.onnx")
    color_network(pack / "recognizer.onnx")
    tasks = {
        "detection": {"file": "detector.onnx"},
        "recognition": {"file": "recognizer.onnx", "embedding_dimension": 64},
        "liveness": {"file": "liveness.onnx"},
    }
    if task != "liveness":
        del tasks["liveness"]
    manifest = {"manifest_version": 2, "model_id": "small", "license": "MODEL.LICENSE", "tasks": tasks}
    (pack / "manifest.json").write_text(json.dumps(manifest))
    write(pack / f"{task}.onnx")
    settings = load_settings(pack=pack, runtime=engine, data_dir=tmp_path / "data", log_level="ERROR")
    with pytest.raises(PackError, match=said), embedded(settings):
        pass
    assert not (tmp_path / "data").exists()
    if (task, engine) == ("recognizer", "onnxruntime"):
        (tmp_path / "work").mkdir()
        done = served(tmp_path / "work", KITH_PACK=str(pack), KITH_RUNTIME=engine)
        assert (done.returncode, list((tmp_path / "work").iterdir())) == (EXIT_FAILED, [])
        assert said in done.stderr and "(pack)" in done.stderr and "Traceback" not in done.stderr


def restricted() -> list[str]:
    """Return the start of a command to which file permissions apply, also for root."""
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


def take_away(path: Path, mode: int) -> None:
    """Give a file to another user. Without root, forbid the owner to write it instead."""
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    path.chmod(mode if os.geteuid() == 0 else mode & 0o444)


@pytest.mark.parametrize(
    ("name", "mode", "command"),
    [
        ("data/kith.db", 0o644, "serve"),
        ("data/kith.db", 0o600, "doctor"),
        ("data/kith.db-shm", 0o600, "serve"),
        ("data", 0o644, "serve"),
        ("data/spool", 0o600, "serve"),
        ("key", 0o600, "doctor"),
    ],
)
def test_a_start_without_the_right_to_write_is_refused(tmp_path: Path, name: str, mode: int, command: str) -> None:
    folder, path = tmp_path / "data", tmp_path / name
    open_database(f"sqlite:///{folder / 'kith.db'}").close()
    if name == "data/spool":
        path.mkdir()
    elif not path.exists():
        path.write_text(f"{TEXT}\n" if name == "key" else "")
    take_away(path, mode | 0o111 if path.is_dir() else mode)
    key = {"KITH_MASTER_KEY_FILE": str(path)} if name == "key" else {"KITH_MASTER_KEY": TEXT}
    try:
        done = served(tmp_path, command, KITH_DATA_DIR=str(folder), COLUMNS="400", **key)
    finally:
        path.chmod(0o755)
    said = done.stdout if command == "doctor" else done.stderr
    assert (done.returncode, str(path) in said) == (1 if command == "doctor" else EXIT_FAILED, True)
    remedy = "KITH_DATA_DIR and KITH_DATABASE_URL to the user that runs Kith (chown)"
    assert remedy in said or name == "key" or command == "doctor"
    assert "Traceback" not in done.stderr


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


@pytest.mark.parametrize(
    ("rights", "said"),
    [
        ("SELECT", "lacks INSERT on"),
        ("SELECT, INSERT, DELETE", "lacks UPDATE on"),
        ("SELECT, INSERT, UPDATE, DELETE", "lacks USAGE on the sequence of"),
    ],
)
def test_a_postgresql_account_without_rights_is_refused(postgres: Postgres, rights: str, said: str) -> None:
    name = f"kith_{uuid.uuid4().hex}"
    owner = postgres.create(name)
    open_database(owner).close()
    account = owner.replace("kith@", f"{name}@")
    plain = engine_of(owner)
    try:
        with plain.begin() as connection:
            connection.execute(sa.text(f"CREATE ROLE {name} LOGIN"))
            connection.execute(sa.text(f"GRANT {rights} ON ALL TABLES IN SCHEMA public TO {name}"))
        with pytest.raises(StorageError, match="permission denied" if "DELETE" not in rights else said) as raised:
            open_database(account)
        assert raised.value.remedy == ACCOUNT_REMEDY
        with plain.begin() as connection:
            connection.execute(sa.text(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}"))
            connection.execute(sa.text(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {name}"))
        database = open_database(account)
        database.check_writable()
        with plain.begin() as connection:
            connection.execute(sa.text(f"ALTER ROLE {name} SET default_transaction_read_only TO on"))
        database.engine.dispose()
        with pytest.raises(StorageError, match="standby"):
            database.check_writable()
        database.close()
        with pytest.raises(StorageError, match="read-only transaction") as raised:
            open_database(account)
        assert raised.value.remedy == ACCOUNT_REMEDY
    finally:
        with plain.begin() as connection:
            connection.execute(sa.text(f"DROP OWNED BY {name}"))
            connection.execute(sa.text(f"DROP ROLE {name}"))
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


def test_commands_name_all_variables_that_nothing_reads(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("KITH_DEVISE=cpu\nOTHER=1\n")
    for words in (["serve"], ["models", "list"]):
        done = served(tmp_path, *words, KITH_MAX_IMAGE="1", KITH_PORT="-1")
        assert done.returncode == EXIT_USAGE
        for said in ("KITH_MAX_IMAGES?", "KITH_DEVICE?", "KITH_PORT: Input should be greater"):
            assert said in " ".join(done.stderr.split())
        assert [path.name for path in tmp_path.iterdir()] == [".env"]


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


MAX_ENTERED = 42
REPEATS = 5
"""Threads in the background enter modules now and then: a request enters those of each repeated one."""


def test_a_photo_s_identify_enters_no_further_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8]
) -> None:
    entered, is_recording = set[str](), threading.Event()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and is_recording.is_set():
            entered.add(frame.f_globals.get("__name__", ""))

    # Of threads that start from now on, as by threading.setprofile.
    monkeypatch.setattr(threading, "_profile_hook", note)
    photo = jpeg(astronaut)
    with embedded(load_settings(data_dir=tmp_path, log_level="WARNING")) as url, Kith(url) as kith:
        kith.create_gallery("staff")
        kith.enroll("staff", "ada", photo)
        recorded = list[set[str]]()
        for _ in range(2 + REPEATS):
            entered.clear()
            is_recording.set()
            assert kith.identify("staff", photo).results[0].subject == "ada"
            is_recording.clear()
            own = {name for name in entered if name.startswith(("service.", "models.", "kith."))}
            recorded.append(own - {"service.core.periodic"})  # writes the audit at its own times
    always = set.intersection(*recorded[2:])
    assert len(always) <= MAX_ENTERED, sorted(always)
