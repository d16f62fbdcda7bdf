"""Behavior that all commands share: exit statuses, streams, errors, completion and resuming."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner, Result

from kith import Kith
from service import server as server_module
from service.cli.main import app
from service.cli.terminal import remedy_lines
from service.cli.words import format_odds
from service.core.errors import all_errors
from service.server import embedded
from service.settings import load_settings
from tests.commands import run_kith
from tests.conftest import ROOT, jpeg

SLOW = {"numpy", "cv2", "torch", "faiss", "onnxruntime", "openvino", "sqlalchemy", "fastapi", "pydantic", "matplotlib"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Console script. Completion depends on its name."""
    script = tmp_path / "bin" / "kith"
    script.parent.mkdir()
    script.write_text("from service.cli.entry import main\n\nif __name__ == '__main__':\n    main()\n")
    return script


@pytest.fixture
def photos(tmp_path: Path, astronaut: NDArray[Any], actor: NDArray[Any], nobody: NDArray[Any]) -> dict[str, Path]:
    taken = {"eileen": astronaut, "again": astronaut[:, ::-1], "tom": actor, "coffee": nobody}
    for name, photo in taken.items():
        (tmp_path / f"{name}.jpg").write_bytes(jpeg(photo))
    (tmp_path / "text.jpg").write_text("no photo")
    return {path.stem: path for path in tmp_path.glob("*.jpg")}


class Program:
    """Console script ``kith``, with KITH_URL set to a server if one is given."""

    def __init__(self, script: Path, server: str | None) -> None:
        self._script = script
        self.environment = os.environ | {"PYTHONPATH": str(ROOT), "KITH_LOG_LEVEL": "WARNING"}
        if server is not None:
            self.environment["KITH_URL"] = server

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(self._script), *map(str, words)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(command, cwd=self._script.parent.parent, env=self.environment, text=True, **streams)

    def __call__(self, *words: str | Path, status: int = 0, **environment: str) -> str:
        self.environment |= environment
        done = run_kith(*map(str, words), cwd=self._script.parent.parent, environment=self.environment)
        self.stderr = done.stderr
        assert done.returncode == status, (words, done.stdout, self.stderr)
        assert "Traceback" not in self.stderr
        return done.stdout

    def completed(self, line: str) -> list[str]:
        """Return bash's completions of the line's last word."""
        done = run_kith(cwd=self._script.parent.parent, environment=self.environment | completion_of(line))
        assert done.stderr == ""
        return done.stdout.split()


@pytest.fixture
def run(program: Path, server: str) -> Program:
    return Program(program, server)


def test_help_and_completion_import_no_slow_package() -> None:
    program = f"import sys, service.cli.main; print(sorted({SLOW!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_exit_status_is_the_answer(run: Program, kith: Kith, gallery: str, photos: dict[str, Path]) -> None:
    assert run("verify", photos["eileen"], photos["again"]).startswith("same: similarity")
    assert run("verify", photos["eileen"], photos["tom"], "--threshold", "0.9", status=1).startswith("different")
    assert run("verify", photos["eileen"], photos["coffee"], status=1) == f"no face: {photos['coffee']}\n"
    kith.enroll(gallery, "ada", photos["eileen"])
    assert "same" in run("verify", photos["again"], "--subject", "ada", "-g", gallery, "--preset", "relaxed")
    assert "ada" in run("identify", photos["again"], "-g", gallery)
    assert "ada" in run("identify", photos["again"], photos["text"], "-g", gallery, status=1)
    assert "image_format: " in run.stderr
    assert "unknown" in run("identify", photos["tom"], "-g", gallery, "--fpir", "0.0001", status=1)
    assert "no face" in run("detect", photos["eileen"], photos["coffee"], status=1)
    run("verify", photos["eileen"], status=2)
    run("identify", photos["tom"], "-g", gallery, "--fpir", "0.1", "--fmr", "0.1", status=2)
    assert "Give only one of these options" in run.stderr
    run("identify", photos["tom"], photos["eileen"], "-g", gallery, "--draw", "one.png", status=2)
    run("identify", photos["text"], "-g", gallery, status=3)
    assert "(image_format)" in run.stderr


def test_errors_name_a_remedy(run: Program, gallery: str, photos: dict[str, Path]) -> None:
    run("gallery", "stats", gallery[:-1], status=3)
    assert "(gallery_not_found)" in run.stderr
    assert f"Did you mean '{gallery}'" in run.stderr
    assert run("gallery", "stats", "missing", "--json", status=3) == ""
    problem = json.loads(run.stderr)
    assert (problem["code"], "kith gallery create" in problem["remedy"]) == ("gallery_not_found", True)
    run("gallery", "stats", gallery, "--url", "http://127.0.0.1:9", status=3)
    assert "(unreachable)" in run.stderr
    run("gallery", "export", gallery, "folder-that-is-not/x.ndjson", status=3)
    assert run.stderr.splitlines() == [
        "error: folder-that-is-not/x.ndjson: No such file or directory (file)",
        "  Check the path. The command does not create missing folders.",
    ]
    run("identfy", photos["tom"], status=2)
    assert run.stderr.splitlines() == [
        "error: No such command 'identfy'. Did you mean 'identify'? (usage)",
        "  See 'kith --help'.",
    ]
    run("detect", "nowhere.jpg", "--json", status=2)
    problem = json.loads(run.stderr)
    assert (problem["code"], "nowhere.jpg" in problem["detail"]) == ("usage", True)
    assert problem["remedy"].startswith("See 'kith detect --help'")
    run("gallery", status=2)


def test_invalid_options_are_rejected_with_the_field(run: Program, gallery: str, photos: dict[str, Path]) -> None:
    create = ("keys", "create", "foo", "--scope", "identify")
    refused: list[tuple[tuple[str | Path, ...], int]] = [
        ((*create, "-g", "a b"), 3),
        ((*create, "--rate", "1e9"), 2),
        ((*create, "--rate", "nan"), 2),
        ((*create, "--days", "inf"), 2),
        ((*create, "--days", "1e9"), 2),
        (("keys", "create", "x" * 200, "--scope", "identify"), 3),
        (("keys", "create", "--scope", "nope"), 2),
        (("keys", "rotate", "0" * 12, "--overlap-hours", "inf"), 2),
        (("identify", photos["tom"], "-g", gallery, "--fpir", "1"), 2),
        (("subject", "update", "ada", "-g", gallery, "--set", "a=NaN"), 2),
        (("subject", "update", "ada", "-g", gallery, "--set", "a=[1e999]"), 2),
    ]
    for words, status in refused:
        run(*words, status=status)
    for words, start in (
        (("gallery", "create", "a b"), "error: name: must be at most 64 letters, digits"),
        (("jobs", "show", "nojob"), "error: job: must be 32 lowercase hexadecimal digits"),
        (("keys", "revoke", "nokey"), "error: key: must be 12 lowercase hexadecimal digits"),
        (
            ("template", "move", "ada", "x", "-g", gallery, "--to", "bob"),
            "error: template: must be 32 lowercase hexadecimal",
        ),
        (("audit", "list", "--since", "yesterday"), "error: since: must be a date like 2026-01-31"),
    ):
        run(*words, status=3)
        assert run.stderr.startswith(start), run.stderr
        assert "--help lists the options" in run.stderr
    run("jobs", "list", "--state", "foo", status=2)
    for words in (
        ("identify", photos["tom"], "-g", gallery, "--fmr", "5"),
        ("gallery", "risk", gallery, "--fpir", "nan"),
    ):
        run(*words, status=2)
        assert "is a share between 0 and 1, for example 0.001." in run.stderr
    run("subject", "show", "o'brien", "-g", gallery, status=3)
    assert "list the subjects" in run.stderr
    run("template", "list", "o'brien", "-g", gallery, status=3)


def test_an_object_has_one_json_form(run: Program, kith: Kith, gallery: str, photos: dict[str, Path]) -> None:
    """Every command prints an object as REST does, nulls included."""
    made = json.loads(run("gallery", "create", f"{gallery[:50]}-json", "--json"))
    listed = json.loads(run("gallery", "list", "--json"))
    assert made in listed
    assert made["retention_days"] is None
    printed = json.loads(run("gallery", "stats", made["name"], "--json"))
    assert printed == made | {"drift": printed["drift"]}
    kith.enroll(gallery, "ada", photos["eileen"])
    updated = json.loads(run("subject", "update", "ada", "-g", gallery, "--tag", "a", "--json"))
    (seen,) = json.loads(run("subject", "list", "-g", gallery, "--json"))
    assert updated == seen
    assert seen["name"] is None
    templates = json.loads(run("template", "list", "ada", "-g", gallery, "--json"))
    assert json.loads(run("subject", "show", "ada", "-g", gallery, "--json")) == seen | {
        "templates": templates["templates"],
    }
    receipt = json.loads(run("subject", "erase", "ada", "-g", gallery, "--yes", "--json"))
    (kept,) = json.loads(run("erasures", "list", "-g", gallery, "--json"))
    assert receipt | {"log_emptied": None} == kept | {"log_emptied": None}


def test_enrolled_photos_are_listed_after_an_error(
    server: str, run: Program, gallery: str, photos: dict[str, Path]
) -> None:
    served = iter([True, False])
    words = ("subject", "enroll", "ada", photos["eileen"], photos["again"], "-g", gallery)
    with refusing(server, lambda path: "/templates" in path and not next(served, False), 500) as url:
        printed = run(*words, "--url", url, status=3)
    assert printed.splitlines() == [
        "1 of 2 photos enrolled as ada",
        f"  {photos['eileen']}: enrolled",
        f"  {photos['again']}: result unknown. Check with 'kith subject show'.",
    ]
    printed = run("subject", "enroll", "eve", photos["again"], photos["coffee"], "-g", gallery, status=1)
    assert "--allow-duplicate" in printed


def test_questions_need_an_answer_or_an_option(run: Program, kith: Kith, gallery: str) -> None:
    gallery = kith.create_gallery(f"{gallery[:50]}-too").name

    def asked(answer: str) -> tuple[str, str, int]:
        process = run.start("gallery", "delete", gallery, stdin=subprocess.PIPE)
        out, stderr = process.communicate(answer, timeout=60)
        return out, stderr, process.returncode

    out, stderr, status = asked("")
    assert (out, "--yes" in stderr, status) == ("", True, 2)
    out, stderr, status = asked("n\n")
    assert (out, "Nothing was changed" in stderr, status) == ("", True, 1)
    process = run.start("gallery", "delete", gallery, stdin=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.read(1) == "D"  # the question
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    out, stderr, status = asked("y\n")
    assert ("receipt" in out, status) == (True, 0)


def test_local_commands_do_not_create_a_database(run: Program, program: Path, tmp_path: Path) -> None:
    for command in (
        ("backup", "b.kith"),
        ("audit", "verify"),
        ("master", "show"),
        ("master", "rotate"),
    ):
        assert run(*command, status=3) == ""
        assert "no database at" in run.stderr
        assert "ignores KITH_URL" in run.stderr
        assert "KITH_DATA_DIR" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]
    run("restore", "nowhere.kith", status=2)
    local = Program(program, None)
    local.environment.pop("KITH_URL", None)
    local("gallery", "create", "staff")
    run("master", "show")
    assert f"This command ignores KITH_URL and uses the local database: {tmp_path}" in run.stderr
    run("audit", "verify")
    assert str(tmp_path) in run.stderr


def test_commands_that_read_do_not_create_a_database(program: Path, tmp_path: Path, photos: dict[str, Path]) -> None:
    run = Program(program, None)
    run.environment.pop("KITH_URL", None)
    (export := tmp_path / "staff.ndjson").touch()
    before = sorted(tmp_path.iterdir())
    for command in (
        ("identify", photos["tom"], "-g", "staff"),
        ("verify", photos["tom"], "--subject", "ada", "-g", "staff"),
        ("gallery", "list"),
        ("gallery", "import", "staff", export),
        ("subject", "enroll", "ada", photos["eileen"], "-g", "staff"),
        ("jobs", "list"),
    ):
        assert run(*command, status=3) == ""
        assert f"KITH_URL is not set, and there is no database at {tmp_path / 'data' / 'kith.db'}" in run.stderr
        assert "Set KITH_URL or --url to your server's address" in run.stderr
    assert run("verify", photos["eileen"], photos["again"]).startswith("same: similarity")
    assert "yes" in run("detect", photos["tom"])
    assert json.loads(run("embed", photos["tom"]))["photos"]
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_gallery_names_the_server_or_database_asked(
    run: Program, program: Path, tmp_path: Path, server: str, photos: dict[str, Path]
) -> None:
    run("identify", photos["tom"], "-g", "absent", status=3)
    assert f"Asked the server {server}." in run.stderr
    run("gallery", "stats", "absent", "--json", status=3)
    assert json.loads(run.stderr)["asked"] == f"the server {server}"
    local = Program(program, None)
    local.environment.pop("KITH_URL", None)
    local("gallery", "create", "staff")
    assert f"Created a new database: {tmp_path / 'data' / 'kith.db'}" in local.stderr
    local("gallery", "stats", "staf", status=3)
    assert f"Asked the database {tmp_path / 'data' / 'kith.db'}, as KITH_URL is not set." in local.stderr
    assert "Did you mean 'staff'?" in local.stderr


def test_creating_a_key_names_its_database(program: Path, tmp_path: Path) -> None:
    run = Program(program, None)
    run.environment.pop("KITH_URL", None)
    for command in (("keys", "list"), ("keys", "revoke", "0" * 12)):
        assert run(*command, status=3) == ""
        assert f"no database at {tmp_path / 'data' / 'kith.db'}" in run.stderr.replace("\n", " ")
    assert not (tmp_path / "data").exists()
    token = run("keys", "create", "--scope", "admin")
    assert token.startswith("kith_")
    assert f"Created a new database: {tmp_path / 'data' / 'kith.db'}" in run.stderr
    again = run("keys", "create", "--scope", "read", "--json")
    assert json.loads(again)["scopes"] == ["read"]
    assert f"only for servers that use {tmp_path / 'data' / 'kith.db'}." in run.stderr.replace("\n", " ")
    assert token.split("_")[1] in run("keys", "list")


def test_a_failed_enrollment_advises_to_resume(
    server: str, run: Program, gallery: str, tmp_path: Path, astronaut: NDArray[Any]
) -> None:
    """The server answers for the gallery, and fails for the photos."""
    (tmp_path / "people" / "ada").mkdir(parents=True)
    (tmp_path / "people" / "ada" / "1.jpg").write_bytes(jpeg(astronaut))
    with refusing(server, lambda path: "/enrollments" in path) as url:
        run("enroll", "people", "-g", gallery, "--report", "report.csv", "--url", url, "--json", status=3)
    assert "run the command again to resume" in json.loads(run.stderr)["remedy"]
    assert (tmp_path / "report.csv").read_text().startswith("photo,status")
    assert (tmp_path / "report.csv").stat().st_mode & 0o777 == 0o600  # folders are named after people


def test_a_subject_is_enrolled_changed_and_erased(
    run: Program, gallery: str, photos: dict[str, Path], kith: Kith
) -> None:
    assert "No subjects" in run("subject", "list", "-g", gallery)
    printed = run(
        "subject", "enroll", "ada", photos["eileen"], photos["coffee"], "-g", gallery, "--name", "Ada", status=1
    )
    assert "1 of 2 photos enrolled as ada" in printed
    assert "no_face" in printed
    run("subject", "update", "ada", "-g", gallery, "--name", "Countess", "--tag", "a", "--tag", "b", "--set", "room=12")
    run("subject", "update", "ada", "-g", gallery, "--untag", "a", "--set", "floor=two")
    now = kith.subject(gallery, "ada")
    assert (now.name, now.tags, now.metadata) == ("Countess", ["b"], {"room": 12, "floor": "two"})
    assert "Countess" in run("subject", "list", "-g", gallery, "--tag", "b")
    (template,) = json.loads(run("subject", "show", "ada", "-g", gallery, "--json"))["templates"]
    assert template["id"] in run("template", "list", "ada", "-g", gallery)
    kith.put_subject(gallery, "countess")
    assert "to countess" in run("template", "move", "ada", template["id"], "-g", gallery, "--to", "countess")
    assert "receipt" in run("template", "delete", "countess", template["id"], "-g", gallery, "--yes")
    receipt = json.loads(run("subject", "erase", "ada", "-g", gallery, "-y", "--json"))
    assert receipt["id"] in run("erasures", "list", "-g", gallery, "--json")
    run("subject", "update", "ada", "-g", gallery, status=2)


def test_embeddings_are_written_to_a_file(run: Program, photos: dict[str, Path], kith: Kith) -> None:
    listed = json.loads(run("embed", photos["eileen"], photos["tom"], "-o", "vectors.npy", "--json"))
    vectors = np.load(photos["eileen"].parent / "vectors.npy")
    assert [row["photo"] for row in listed["rows"]] == [str(photos["eileen"]), str(photos["tom"])]
    (face,) = kith.embed(photos["tom"]).images[0].faces
    assert face.embedding is not None
    assert (vectors.dtype, vectors.shape) == (np.float32, (2, len(face.embedding)))
    assert np.allclose(vectors[1], face.embedding, atol=1e-6)
    none = json.loads(run("embed", photos["coffee"], "-o", "none.npy", "--json", status=1))
    assert (none["file"], none["rows"], Path("none.npy").exists()) == (None, [], False)


def test_several_photos_are_drawn_to_a_folder(run: Program, gallery: str, photos: dict[str, Path]) -> None:
    folder = photos["tom"].parent
    (folder / "more").mkdir()
    (folder / "more" / "tom.jpg").write_bytes(photos["tom"].read_bytes())
    run("identify", photos["tom"], folder / "more" / "tom.jpg", "-g", gallery, "--draw", "drawn", status=1)
    assert sorted(path.name for path in (folder / "drawn").iterdir()) == ["tom-2.jpg", "tom.jpg"]
    (folder / "more" / "tom-2.jpg").write_bytes(photos["coffee"].read_bytes())
    three = (photos["tom"], folder / "more" / "tom.jpg", folder / "more" / "tom-2.jpg")
    run("detect", *three, "--draw", "three", status=1)
    assert len(list((folder / "three").iterdir())) == 3
    run("detect", photos["eileen"], "--draw", "found.png")
    with Image.open(folder / "found.png") as picture:
        assert max(picture.size) >= 1280


def test_strangers_are_listed_named_merged_and_forgotten(
    run: Program, kith: Kith, gallery: str, photos: dict[str, Path]
) -> None:
    of = ("-g", gallery)
    assert "--remember-strangers-days" in run("stranger", "list", *of)
    run("gallery", "update", gallery, "--remember-strangers-days", "30")
    for name in ("eileen", "tom"):
        assert "visit 1" in run("identify", photos[name], "--faces", "largest", *of, status=1)
    tom, eileen = json.loads(run("stranger", "list", *of, "--json"))
    assert eileen["id"] in run("stranger", "list", *of)
    assert "seen 2 times" in run("stranger", "merge", tom["id"], "--into", eileen["id"], "--yes", *of)
    document = json.loads(run("stranger", "export", eileen["id"], *of))
    assert len(document["subject"]["templates"]) == 2
    assert "ada has 2 templates" in run("stranger", "promote", eileen["id"], "ada", "--name", "Ada", *of)
    assert kith.subject(gallery, "ada").name == "Ada"
    kith.delete_subject(gallery, "ada")
    run("identify", photos["tom"], "--faces", "largest", *of, status=1)
    (again,) = kith.strangers(gallery)
    run("stranger", "forget", again.id, "--all", *of, status=2)
    assert "receipt" in run("stranger", "forget", again.id, "--yes", *of)
    assert "receipt" in run("stranger", "forget", "--all", "--yes", *of)
    run("gallery", "update", gallery, "--remember-strangers-days", "0")
    assert kith.gallery(gallery).remember_strangers_days is None


def test_drawing_never_overwrites_a_photo(run: Program, gallery: str, photos: dict[str, Path]) -> None:
    folder = photos["tom"].parent
    (folder / "linked.png").symlink_to(photos["tom"])
    (folder / "same").mkdir()
    (folder / "same" / "tom.jpg").hardlink_to(photos["tom"])
    before = {name: path.read_bytes() for name, path in photos.items()}
    for target in (".", photos["tom"], "linked.png", "same"):
        run("detect", photos["tom"], "--draw", target, status=2)
        assert "of the photos" in run.stderr
    run("identify", photos["eileen"], photos["tom"], "-g", gallery, "--draw", folder, status=2)
    assert {name: path.read_bytes() for name, path in photos.items()} == before


@contextmanager
def refusing(server: str, refused: Callable[[str], bool], status: int = 409) -> Iterator[str]:
    """Yield the address of a proxy that fails the requests whose path ``refused`` selects."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = self.headers["Content-Length"]
            if refused(self.path):
                self.close_connection = True
                self._answer(status, b'{"code": "torn", "detail": "Failed.", "remedy": "Retry."}')
                return
            body = None if length is None else self.rfile.read(int(length))
            with closing(HTTPConnection(urlsplit(server).netloc)) as connection:
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                self._answer(answer.status, answer.read())

        do_POST = do_GET

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()


def test_answers_are_printed_after_an_error(server: str, run: Program, photos: dict[str, Path]) -> None:
    requests = itertools.count(1)
    two = (photos["eileen"], photos["tom"])
    with refusing(server, lambda _: next(requests) % 2 == 0) as url:
        for command in ("detect", "embed"):
            printed = json.loads(run(command, *two, "--json", "--url", url, status=3))
            assert list(printed.get("photos", printed)) == [str(photos["eileen"])]
            assert json.loads(run.stderr)["code"] == "torn"
        run("embed", *two, "-o", "some.npy", "--url", url, status=3)
        assert len(np.load(photos["tom"].parent / "some.npy")) == 1


def test_a_closed_pipe_ends_without_a_message(run: Program) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    process = run.start("models", "list", stdout=writable)
    os.close(writable)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 141)


def test_a_killed_import_resumes(run: Program, kith: Kith, gallery: str, tmp_path: Path, rng: Any) -> None:
    count = 4000
    vectors = rng.standard_normal((count, kith.model().dimension))
    header = {"kith": "gallery", "version": 1, "recognizer": kith.model().recognizer, "dimension": vectors.shape[1]}
    lines = [header] + [
        {"subject": f"s{number}", "template": f"{number:032x}", "embedding": vector.tolist()}
        for number, vector in enumerate(vectors)
    ]
    file = tmp_path / "people.ndjson"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = run.start("gallery", "import", gallery, file)
    while kith.gallery(gallery).template_count == 0 and process.poll() is None:
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    report = json.loads(run("gallery", "import", gallery, file, "--json"))
    assert (report["template_count"] + report["present_count"], report["refused_count"]) == (count, 0)
    assert kith.gallery(gallery).template_count == count
    assert len(run("gallery", "export", gallery, "out.ndjson", "--json")) > 0
    assert len((tmp_path / "out.ndjson").read_text().splitlines()) == count + 1


def test_a_killed_local_enrollment_resumes(program: Path, tmp_path: Path, astronaut: NDArray[Any]) -> None:
    run, photo = Program(program, None), jpeg(astronaut)
    (tmp_path / "people" / "eileen").mkdir(parents=True)
    for number in range(30):
        (tmp_path / "people" / "eileen" / f"{number}.jpg").write_bytes(photo + number.to_bytes(4))
    process = run.start("enroll", "people", "-g", "g")
    spooled = tmp_path / "data" / "spool"
    while not (spooled.is_dir() and any(spooled.iterdir())) and process.poll() is None:
        pass  # wait for the upload, so that the process dies during the job
    process.send_signal(signal.SIGKILL)
    process.communicate()
    report = json.loads(run("enroll", "people", "-g", "g", "--json"))
    assert (report["enrolled_count"] + report["already_enrolled_count"], report["refused"]) == (30, [])
    with embedded(load_settings(data_dir=tmp_path / "data", log_level="WARNING")) as url:
        assert json.loads(run("gallery", "stats", "g", "--json", KITH_URL=url))["template_count"] == 30
        job = json.loads(run("jobs", "list", "--json"))[0]["id"]
        assert "succeeded" in run("jobs", "watch", job)


def completion_of(line: str) -> dict[str, str]:
    """Return the variables with which bash asks for completions of a line's last word."""
    return {"_KITH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}


def test_the_installed_script_completes_a_line(run: Program) -> None:
    run.environment |= completion_of("kith ident")
    assert run.start().communicate(timeout=60) == ("identify\n", "")


def test_completion_proposes_commands_options_and_choices(run: Program) -> None:
    assert run.completed("kith ident") == ["identify"]
    assert run.completed("kith gallery exp") == ["export"]
    assert "--fpir" in run.completed("kith identify --f")
    assert run.completed("kith keys create --scope id") == ["identify"]
    assert run.completed("kith jobs list --state fa") == ["failed"]


def test_commands_on_an_empty_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("KITH_LOG_LEVEL", "WARNING")
    for name in ("KITH_URL", "KITH_MASTER_KEY"):
        monkeypatch.delenv(name, raising=False)

    def printed(*words: str, status: int = 0) -> Result:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == status, (words, done.output, done.exception)
        return done

    first = printed("gallery", "create", "staff")
    assert first.stdout.startswith(
        "Created gallery staff. With 100 people enrolled by one photo each and an FPIR of 0.01"
    )
    assert "'kith models pull open-model-zoo'" in first.stdout.replace("\n", " ")
    assert f"Created a new database: {tmp_path / 'data' / 'kith.db'}" in first.stderr.replace("\n", "")
    assert "Created" not in printed("jobs", "list").stderr
    assert printed("keys", "list").stdout.startswith("No API keys")
    assert printed("erasures", "list", "-g", "staff").stdout.startswith("No erasures in gallery staff")
    assert printed("audit", "list", "--event", "nothing").stdout == "Nothing matches.\n"
    verified = json.loads(printed("audit", "verify", "--json").stdout)
    assert (verified["faults"], verified["pruned"]) == ([], 0) and verified["lines"] > 0
    rotated = json.loads(printed("master", "rotate", "--new", "--json").stdout)
    key, _ = [row["id"] for row in json.loads(printed("master", "show", "--json").stdout)]
    assert rotated == {"id": key, "gallery_count": 1}
    assert json.loads(printed("master", "rotate", "--json").stdout) == rotated | {"gallery_count": 0}


def test_ctrl_c_exits_with_130_without_a_traceback(run: Program, photos: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        process = run.start("detect", photos["tom"], "--url", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with silent.accept()[0]:  # the client waits for an answer
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in stderr) == (130, False)


def test_ctrl_c_during_the_imports_prints_nothing() -> None:
    interrupted = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "service.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from service.cli.entry import main
main()
"""
    done = subprocess.run([sys.executable, "-c", interrupted], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_interrupted_start_ends_the_embedded_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that still runs would abort the interpreter at exit."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = {thread for thread in threading.enumerate() if thread.name == "kith-server"}
    monkeypatch.setattr(server_module, "_wait_for_start", interrupted)
    with pytest.raises(KeyboardInterrupt), embedded(load_settings(data_dir=tmp_path, log_level="WARNING")):
        pass
    assert {thread for thread in threading.enumerate() if thread.name == "kith-server"} == before


def test_odds_are_rounded_to_words() -> None:
    assert [format_odds(chance) for chance in (0.4, 0.05, 0.001, 3.21e-5, 1e-12)] == [
        "40 in 100",
        "1 in 20",
        "1 in 1,000",
        "1 in 31,000",
        "less than 1 in 1,000,000,000",
    ]
    assert format_odds(2.04e-6, is_bound=True) == "less than 1 in 490,000"


def test_each_error_code_gets_one_line() -> None:
    problems = [{"code": "low_quality", "remedy": f"Photo {number}."} for number in range(3)]
    assert remedy_lines([{"code": "no_face", "remedy": "Turn it."}, *problems]) == [
        "no_face: Turn it.",
        "low_quality: Photo 0.",
    ]
    assert remedy_lines([{"code": "without_remedy"}]) == []


def test_no_remedy_is_for_api_clients_only() -> None:
    """The command line prints the same remedies."""
    for error in all_errors():
        assert "repeat the request" not in error.remedy, error
        assert not error.remedy.startswith(("Send GET", "Send POST")), error
