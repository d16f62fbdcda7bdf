"""What the command line promises whatever the command: its statuses, its streams, its completions, and that what was
interrupted goes on."""

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

from service.cli import app
from service.client import Kith
from service.server import embedded
from service.settings import load_settings
from service.words import odds
from tests.commands import called
from tests.conftest import ROOT, jpeg

SLOW = {"numpy", "cv2", "torch", "faiss", "onnxruntime", "openvino", "sqlalchemy", "fastapi", "pydantic", "matplotlib"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """As the environment's script would be: its name is what completion goes by."""
    script = tmp_path / "bin" / "kith"
    script.parent.mkdir()
    script.write_text("from service.entry import main\n\nif __name__ == '__main__':\n    main()\n")
    return script


@pytest.fixture
def photos(tmp_path: Path, astronaut: NDArray[Any], actor: NDArray[Any], nobody: NDArray[Any]) -> dict[str, Path]:
    taken = {"eileen": astronaut, "again": astronaut[:, ::-1], "tom": actor, "coffee": nobody}
    for name, photo in taken.items():
        (tmp_path / f"{name}.jpg").write_bytes(jpeg(photo))
    (tmp_path / "text.jpg").write_text("no photo")
    return {path.stem: path for path in tmp_path.glob("*.jpg")}


class Program:
    """``kith`` against a server."""

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
        done = called(*map(str, words), cwd=self._script.parent.parent, environment=self.environment)
        self.said = done.stderr
        assert done.returncode == status, (words, done.stdout, self.said)
        assert "Traceback" not in self.said
        return done.stdout

    def completed(self, line: str) -> list[str]:
        """What bash proposes for the line's last word."""
        words = line.split(" ")
        asked = {"_KITH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        command = [sys.executable, str(self._script)]
        done = subprocess.run(
            command, cwd=self._script.parent.parent, env=self.environment | asked, capture_output=True, text=True
        )
        assert done.stderr == ""
        return done.stdout.split()


@pytest.fixture
def run(program: Path, server: str) -> Program:
    return Program(program, server)


def test_help_and_completion_import_nothing_slow() -> None:
    looked = f"import sys, service.cli; print(sorted({SLOW!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", looked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_status_is_the_answer(run: Program, kith: Kith, gallery: str, photos: dict[str, Path]) -> None:
    assert run("verify", photos["eileen"], photos["again"]).startswith("same: similarity")
    assert run("verify", photos["eileen"], photos["tom"], "--threshold", "0.9", status=1).startswith("different")
    assert run("verify", photos["eileen"], photos["coffee"], status=1) == f"no face: {photos['coffee']}\n"
    kith.enrol(gallery, "ada", photos["eileen"])
    assert "same" in run("verify", photos["again"], "--subject", "ada", "-g", gallery, "--preset", "relaxed")
    assert "ada" in run("identify", photos["again"], "-g", gallery)
    assert "ada" in run("identify", photos["again"], photos["text"], "-g", gallery, status=1)
    assert "image_format: " in run.said
    assert "unknown" in run("identify", photos["tom"], "-g", gallery, "--fpir", "0.0001", status=1)
    assert "no face" in run("detect", photos["eileen"], photos["coffee"], status=1)
    run("verify", photos["eileen"], status=2)
    run("identify", photos["tom"], "-g", gallery, "--fpir", "0.1", "--fmr", "0.1", status=2)
    assert "give one of them alone" in run.said
    run("identify", photos["tom"], photos["eileen"], "-g", gallery, "--draw", "one.png", status=2)
    run("identify", photos["text"], "-g", gallery, status=3)
    assert "(image_format)" in run.said


def test_errors_say_what_to_do(run: Program, gallery: str, photos: dict[str, Path]) -> None:
    run("gallery", "stats", gallery[:-1], status=3)
    assert "(gallery_not_found)" in run.said
    assert f"Did you mean '{gallery}'" in run.said
    assert run("gallery", "stats", "nobody", "--json", status=3) == ""
    problem = json.loads(run.said)
    assert (problem["code"], "kith gallery create" in problem["remedy"]) == ("gallery_not_found", True)
    run("gallery", "stats", gallery, "--url", "http://127.0.0.1:9", status=3)
    assert "(unreachable)" in run.said
    run("gallery", "export", gallery, "folder-that-is-not/x.ndjson", status=3)
    assert run.said.splitlines() == [
        "error: folder-that-is-not/x.ndjson: No such file or directory (file)",
        "  See that it, or the folder that it is to be written to, is there: no folder is made.",
    ]
    run("erasures", "repeat", photos["text"], status=2)
    assert "erasures save" in " ".join(run.said.split())
    run("identfy", photos["tom"], status=2)
    assert run.said.splitlines() == [
        "error: No such command 'identfy'. Did you mean 'identify'? (usage)",
        "  'kith --help' says what it takes.",
    ]
    run("detect", "nowhere.jpg", "--json", status=2)
    problem = json.loads(run.said)
    assert (problem["code"], "nowhere.jpg" in problem["detail"]) == ("usage", True)
    assert problem["remedy"].startswith("'kith detect --help'")
    run("gallery", status=2)


def test_what_cannot_be_asked_for_is_refused_with_words(run: Program, gallery: str, photos: dict[str, Path]) -> None:
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
    for asked, said in (
        (("gallery", "create", "a b"), "error: name: should have letters, digits and . _ - alone"),
        (("jobs", "show", "nojob"), "error: job: should have 32 hexadecimal digits"),
        (("keys", "revoke", "nokey"), "error: key: should have 12 hexadecimal digits"),
        (("template", "move", "ada", "x", "-g", gallery, "--to", "bob"), "error: template: should have 32 hexadecimal"),
        (("audit", "list", "--since", "yesterday"), "error: since: should be a date like 2026-01-31"),
    ):
        run(*asked, status=3)
        assert run.said.startswith(said), run.said
        assert "'--help' after the command" in run.said
    run("jobs", "list", "--state", "foo", status=2)
    run("subject", "show", "o'brien", "-g", gallery, status=3)
    assert f"kith subject list --gallery {gallery}" in run.said
    run("template", "list", "o'brien", "-g", gallery, status=3)


def test_one_object_is_one_document(run: Program, kith: Kith, gallery: str, photos: dict[str, Path]) -> None:
    """What is null is there, as REST answers it, whichever command tells it."""
    made = json.loads(run("gallery", "create", f"{gallery[:50]}-json", "--json"))
    listed = json.loads(run("gallery", "list", "--json"))
    assert made in listed
    assert made["retention_days"] is None
    told = json.loads(run("gallery", "stats", made["name"], "--json"))
    own = made.keys() - {"drift", "index"}  # of which it tells more
    assert {key: told[key] for key in own} == {key: made[key] for key in own}
    kith.enrol(gallery, "ada", photos["eileen"])
    updated = json.loads(run("subject", "update", "ada", "-g", gallery, "--tag", "a", "--json"))
    (seen,) = json.loads(run("subject", "list", "-g", gallery, "--json"))
    assert updated == seen
    assert seen["name"] is None
    templates = json.loads(run("template", "list", "ada", "-g", gallery, "--json"))
    assert json.loads(run("subject", "show", "ada", "-g", gallery, "--json")) == seen | {
        "templates": templates["templates"]
    }
    receipt = json.loads(run("subject", "erase", "ada", "-g", gallery, "--yes", "--json"))
    (kept,) = json.loads(run("erasures", "list", "-g", gallery, "--json"))
    assert receipt | {"log_emptied": None} == kept | {"log_emptied": None}


def test_what_was_enrolled_is_told_whatever_ends_the_rest(
    server: str, run: Program, gallery: str, photos: dict[str, Path]
) -> None:
    served = iter([True, False])
    words = ("subject", "enroll", "ada", photos["eileen"], photos["again"], "-g", gallery)
    with refusing(server, lambda path: "/templates" in path and not next(served, False), 500) as url:
        told = run(*words, "--url", url, status=3)
    assert told.splitlines() == [
        "1 of 2 photos enrolled as ada",
        f"  {photos['eileen']}: enrolled",
        f"  {photos['again']}: it may be enrolled: 'kith subject show' tells",
    ]
    told = run("subject", "enroll", "eve", photos["again"], photos["coffee"], "-g", gallery, status=1)
    assert "insist with --allow-duplicate" in told
    assert "allow_duplicate'" not in told


def test_questions_are_answered_or_the_option_is_named(run: Program, kith: Kith, gallery: str) -> None:
    gallery = kith.create_gallery(f"{gallery[:50]}-too").name

    def asked(answer: str) -> tuple[str, str, int]:
        process = run.start("gallery", "delete", gallery, stdin=subprocess.PIPE)
        out, said = process.communicate(answer, timeout=60)
        return out, said, process.returncode

    out, said, status = asked("")
    assert (out, "--yes" in said, status) == ("", True, 2)
    out, said, status = asked("n\n")
    assert (out, "nothing was done" in said, status) == ("", True, 1)
    process = run.start("gallery", "delete", gallery, stdin=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.read(1) == "D"  # it asks
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    out, said, status = asked("y\n")
    assert ("receipt" in out, status) == (True, 0)


def test_what_is_of_this_machine_makes_no_database(run: Program, tmp_path: Path) -> None:
    for command in (
        ("backup", "b.kith"),
        ("gallery", "check"),
        ("audit", "verify"),
        ("audit", "export", "a.ndjson"),
        ("erasures", "save", "e.json"),
    ):
        assert run(*command, status=3) == ""
        assert "no database at" in run.said
        assert "KITH_URL does not count" in run.said
        assert "KITH_DATA_DIR" in run.said
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]
    run("restore", "nowhere.kith", status=2)
    run("master", "show")
    assert f"KITH_URL does not count for this command: it looks at the database of this machine, {tmp_path}" in run.said
    run("gallery", "check")
    assert str(tmp_path) in run.said


def test_the_first_key_says_which_database_it_is_in(program: Path, tmp_path: Path) -> None:
    run = Program(program, None)
    run.environment.pop("KITH_URL", None)
    for command in (("keys", "list"), ("keys", "revoke", "0" * 12)):
        assert run(*command, status=3) == ""
        assert f"no database at {tmp_path / 'data' / 'kith.db'}" in run.said.replace("\n", " ")
    assert not (tmp_path / "data").exists()
    token = run("keys", "create", "--scope", "admin")
    assert token.startswith("kith_")
    assert f"no database at {tmp_path / 'data' / 'kith.db'}: it is made now" in run.said
    again = run("keys", "create", "--scope", "read", "--json")
    assert json.loads(again)["scopes"] == ["read"]
    assert f"in the database {tmp_path / 'data' / 'kith.db'}" in run.said
    assert token.split("_")[1] in run("keys", "list")


def test_the_risk_curve_in_a_pipe_is_text_alone(kith: Kith, gallery: str, photos: dict[str, Path]) -> None:
    from service.risk_plot import risk_text

    kith.enrol(gallery, "ada", photos["eileen"])
    assert "\x1b" not in risk_text(kith.risk(gallery), 80)


def test_an_enrolment_whose_server_ends_says_how_to_go_on(
    server: str, run: Program, gallery: str, tmp_path: Path, astronaut: NDArray[Any]
) -> None:
    """The server is there for the gallery, and gone for the photos."""
    (tmp_path / "people" / "ada").mkdir(parents=True)
    (tmp_path / "people" / "ada" / "1.jpg").write_bytes(jpeg(astronaut))
    with refusing(server, lambda path: "/enrolments" in path) as url:
        run("enroll", "people", "-g", gallery, "--report", "report.csv", "--url", url, "--json", status=3)
    assert "run the same again to go on" in json.loads(run.said)["remedy"]
    assert (tmp_path / "report.csv").read_text().startswith("photo,status")
    assert (tmp_path / "report.csv").stat().st_mode & 0o777 == 0o600  # folders are named after people


def test_a_person_is_enrolled_changed_and_erased(
    run: Program, gallery: str, photos: dict[str, Path], kith: Kith
) -> None:
    assert "nobody" in run("subject", "list", "-g", gallery)
    told = run("subject", "enroll", "ada", photos["eileen"], photos["coffee"], "-g", gallery, "--name", "Ada", status=1)
    assert "1 of 2 photos enrolled as ada" in told
    assert "no_face" in told
    run("subject", "update", "ada", "-g", gallery, "--name", "Countess", "--tag", "a", "--tag", "b", "--set", "room=12")
    run("subject", "update", "ada", "-g", gallery, "--untag", "a", "--set", "floor=two")
    now = kith.subject(gallery, "ada")
    assert (now.name, now.tags, now.metadata) == ("Countess", ["b"], {"room": 12, "floor": "two"})
    assert "Countess" in run("subject", "list", "-g", gallery, "--tag", "b")
    (template,) = json.loads(run("subject", "show", "ada", "-g", gallery, "--json"))["templates"]
    assert template["id"] in run("template", "list", "ada", "-g", gallery)
    kith.put_subject(gallery, "countess")
    assert "countess's" in run("template", "move", "ada", template["id"], "-g", gallery, "--to", "countess")
    assert "receipt" in run("template", "delete", "countess", template["id"], "-g", gallery, "--yes")
    receipt = json.loads(run("subject", "erase", "ada", "-g", gallery, "-y", "--json"))
    assert "holds" in run("erasures", "verify", receipt["id"])
    run("subject", "update", "ada", "-g", gallery, status=2)


def test_vectors_go_into_a_file(run: Program, photos: dict[str, Path], kith: Kith) -> None:
    listed = json.loads(run("embed", photos["eileen"], photos["tom"], "-o", "vectors.npy", "--json"))
    vectors = np.load(photos["eileen"].parent / "vectors.npy")
    assert [row["photo"] for row in listed["rows"]] == [str(photos["eileen"]), str(photos["tom"])]
    (face,) = kith.embed(photos["tom"]).images[0].faces
    assert face.embedding is not None
    assert (vectors.dtype, vectors.shape) == (np.float32, (2, len(face.embedding)))
    assert np.allclose(vectors[1], face.embedding, atol=1e-6)
    none = json.loads(run("embed", photos["coffee"], "-o", "none.npy", "--json", status=1))
    assert (none["file"], none["rows"], Path("none.npy").exists()) == (None, [], False)


def test_several_photos_are_drawn_into_a_folder(run: Program, gallery: str, photos: dict[str, Path]) -> None:
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


def test_no_picture_is_drawn_over_a_photo(run: Program, gallery: str, photos: dict[str, Path]) -> None:
    folder = photos["tom"].parent
    (folder / "linked.png").symlink_to(photos["tom"])
    (folder / "same").mkdir()
    (folder / "same" / "tom.jpg").hardlink_to(photos["tom"])
    before = {name: path.read_bytes() for name, path in photos.items()}
    for target in (".", photos["tom"], "linked.png", "same"):
        run("detect", photos["tom"], "--draw", target, status=2)
        assert "of the photos" in run.said
    run("identify", photos["eileen"], photos["tom"], "-g", gallery, "--draw", folder, status=2)
    assert {name: path.read_bytes() for name, path in photos.items()} == before


@contextmanager
def refusing(server: str, refused: Callable[[str], bool], status: int = 409) -> Iterator[str]:
    """The address of what stands before the server, and answers as asked to what is refused, by its path."""

    class Between(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = self.headers["Content-Length"]
            if refused(self.path):
                self.close_connection = True
                self._answer(status, b'{"code": "torn", "detail": "no longer", "remedy": "See to it."}')
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

    with ThreadingHTTPServer(("127.0.0.1", 0), Between) as between:
        Thread(target=between.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{between.server_port}"
        between.shutdown()


def test_what_was_answered_is_told_whatever_ends_the_rest(server: str, run: Program, photos: dict[str, Path]) -> None:
    requests = itertools.count(1)
    two = (photos["eileen"], photos["tom"])
    with refusing(server, lambda _: next(requests) % 2 == 0) as url:
        for command in ("detect", "embed"):
            told = json.loads(run(command, *two, "--json", "--url", url, status=3))
            assert list(told.get("photos", told)) == [str(photos["eileen"])]
            assert json.loads(run.said)["code"] == "torn"
        run("embed", *two, "-o", "some.npy", "--url", url, status=3)
        assert len(np.load(photos["tom"].parent / "some.npy")) == 1


def test_what_nobody_reads_ends_quietly(run: Program) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    process = run.start("models", "list", stdout=writable)
    os.close(writable)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 141)


def test_what_is_killed_goes_on(run: Program, kith: Kith, gallery: str, tmp_path: Path, rng: Any) -> None:
    count = 4000
    vectors = rng.standard_normal((count, kith.model().dimension))
    header = {"kith": "gallery", "version": 1, "recogniser": kith.model().recogniser, "dimension": vectors.shape[1]}
    lines = [header] + [
        {"subject": f"s{number}", "template": f"{number:032x}", "embedding": vector.tolist()}
        for number, vector in enumerate(vectors)
    ]
    file = tmp_path / "people.ndjson"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = run.start("gallery", "import", gallery, file)
    while kith.gallery(gallery).templates == 0 and process.poll() is None:
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    report = json.loads(run("gallery", "import", gallery, file, "--json"))
    assert (report["templates"] + report["present"], report["refused"]) == (count, 0)
    assert kith.gallery(gallery).templates == count
    assert len(run("gallery", "export", gallery, "out.ndjson", "--json")) > 0
    assert len((tmp_path / "out.ndjson").read_text().splitlines()) == count + 1


def test_a_killed_enrolment_of_the_local_database_goes_on(
    program: Path, tmp_path: Path, astronaut: NDArray[Any]
) -> None:
    run, photo = Program(program, None), jpeg(astronaut)
    (tmp_path / "people" / "eileen").mkdir(parents=True)
    for number in range(60):
        (tmp_path / "people" / "eileen" / f"{number}.jpg").write_bytes(photo + number.to_bytes(4))
    process = run.start("enroll", "people", "-g", "g")
    spooled = tmp_path / "data" / "spool"
    while not (spooled.is_dir() and any(spooled.iterdir())) and process.poll() is None:
        pass  # until the archive is there, so that it dies in the midst of the job, or before its first photo
    process.send_signal(signal.SIGKILL)
    process.communicate()
    report = json.loads(run("enroll", "people", "-g", "g", "--json"))
    assert (report["enrolled"] + report["already_enrolled"], report["refused"]) == (60, [])
    assert json.loads(run("gallery", "stats", "g", "--json"))["templates"] == 60
    assert run.completed("kith gallery stats g") == ["g"]  # from the file
    assert run.completed("kith subject show -g g e") == ["eileen"]
    job = run.completed("kith jobs show ")[0]
    assert "succeeded" in run("jobs", "watch", job)


def test_a_shell_is_proposed_what_there_is(run: Program, kith: Kith, gallery: str, tmp_path: Path) -> None:
    kith.put_subject(gallery, "ada lovelace-1")
    kith.put_subject(gallery, "grace")
    assert run.completed("kith ident") == ["identify"]
    assert run.completed("kith gallery exp") == ["export"]
    assert "--fpir" in run.completed("kith identify --f")
    assert run.completed(f"kith gallery stats {gallery[:-2]}") == [gallery]
    assert run.completed(f"kith identify x.jpg -g {gallery[:-2]}") == [gallery]
    assert run.completed(f"kith subject show -g {gallery} gr") == ["grace"]
    assert run.completed("kith models show dlib") == ["dlib-resnet"]
    vector = np.eye(kith.model().dimension)[0]
    made = kith.enrol(gallery, "grace", embeddings=[vector], recogniser=kith.model().recogniser).results[0].template
    assert run.completed(f"kith template move -g {gallery} grace ") == [made]
    assert run.completed("kith embed --model ") == [kith.model().model]
    assert run.completed("kith keys create --scope id") == ["identify"]
    assert run.completed("kith jobs list --state fa") == ["failed"]
    assert "subject_put" in run.completed("kith audit list --event ")
    run.environment["KITH_URL"] = "http://127.0.0.1:9"
    assert run.completed("kith gallery stats ") == []
    del run.environment["KITH_URL"]
    assert run.completed("kith gallery stats ") == []
    assert not (tmp_path / "data").exists()


def test_the_local_database_is_told_of_in_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For people and as JSON; and when it is made, and when there is nothing in it."""
    monkeypatch.setenv("KITH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("KITH_LOG_LEVEL", "WARNING")
    for name in ("KITH_URL", "KITH_MASTER_KEY"):
        monkeypatch.delenv(name, raising=False)

    def told(*words: str, status: int = 0) -> Result:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == status, (words, done.output, done.exception)
        return done

    first = told("gallery", "list")
    assert "no gallery yet" in first.stdout
    assert f"made a new database: {tmp_path / 'data' / 'kith.db'}" in first.stderr.replace("\n", "")
    assert "made a new" not in told("jobs", "list").stderr
    assert told("keys", "list").stdout.startswith("no key: ")
    assert told("gallery", "create", "staff").stdout == "created staff\n"
    assert told("erasures", "list", "-g", "staff").stdout.startswith("no erasure in staff: ")
    assert told("audit", "list", "--event", "nothing").stdout.startswith("no line ")
    audit = json.loads(told("audit", "export", str(tmp_path / "a.ndjson"), "--json").stdout)
    assert audit["bytes"] == (tmp_path / "a.ndjson").stat().st_size
    heads = json.loads(told("audit", "head", "--json").stdout)
    assert {"staff"} <= {head["gallery"] for head in heads}
    saved = json.loads(told("erasures", "save", str(tmp_path / "e.json"), "--json").stdout)
    assert saved == {"file": str(tmp_path / "e.json"), "receipts": 0}
    assert json.loads(told("erasures", "repeat", str(tmp_path / "e.json"), "--json").stdout) == {
        "receipts": 0,
        "erased": [],
    }
    (tmp_path / "e.json").write_text("{}")
    assert "it is no list" in " ".join(told("erasures", "repeat", str(tmp_path / "e.json"), status=2).stderr.split())
    key = json.loads(told("master", "new", "--json").stdout)["id"]
    rotated = json.loads(told("master", "rotate", "--to", key, "--json").stdout)
    assert rotated == {"id": key, "galleries": 1, "broken": []}
    (old,) = [row["id"] for row in json.loads(told("master", "show", "--json").stdout) if row["id"] != key]
    assert json.loads(told("master", "forget", old, "--yes", "--json").stdout) == {"id": old}
    # Where one may look for them.
    assert "Derive" not in told("gallery", "--help").stdout
    told("gallery", "calibrate", "--help")
    told("subject", "delete", "--help")


def test_ctrl_c_is_130_and_says_nothing(run: Program, photos: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        process = run.start("detect", photos["tom"], "--url", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with silent.accept()[0]:  # it waits for an answer now
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in said) == (130, False)


def test_ctrl_c_while_it_is_imported_says_nothing() -> None:
    interrupted = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "service.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from service.entry import main
main()
"""
    done = subprocess.run([sys.executable, "-c", interrupted], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_embedded_service_that_is_left_as_it_starts_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would go on into the interpreter's end, which it aborts."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = {thread for thread in threading.enumerate() if thread.name == "kith-server"}
    monkeypatch.setattr("service.server._wait_for_start", interrupted)
    with pytest.raises(KeyboardInterrupt), embedded(load_settings(data_dir=tmp_path, log_level="WARNING")):
        pass
    assert {thread for thread in threading.enumerate() if thread.name == "kith-server"} == before


def test_a_server_is_measured(run: Program, photos: dict[str, Path]) -> None:
    words = ("bench", photos["eileen"], photos["tom"], "--seconds", "0.3", "--clients", "2", "--json")
    measured = json.loads(run(*words))
    assert [each["task"] for each in measured["figures"]] == ["detect", "embed", "verify"]
    for each in measured["figures"]:
        assert each["requests"] > 0
        assert 0 < each["p50_ms"] <= each["p95_ms"] <= each["p99_ms"]
        assert each["failed"] == {}
    assert measured["about"]["faces_each"] == 1
    assert "cores" in measured["about"]["machine"]
    run("bench", photos["text"], "--seconds", "0.3", status=3)


def test_a_server_of_its_own_is_measured(program: Path, photos: dict[str, Path], tmp_path: Path) -> None:
    run = Program(program, None)
    words = ("--seconds", "0.3", "--clients", "1", "--task", "identify", "--people", "50", "--json")
    (figures,) = json.loads(run("bench", photos["eileen"], *words))["figures"]
    assert (figures["task"], figures["requests"] > 0) == ("identify", True)
    assert not (tmp_path / "data").exists()


def test_chances_in_words() -> None:
    assert [odds(chance) for chance in (0.4, 0.05, 0.001, 3.21e-5, 1e-12)] == [
        "40 in 100",
        "1 in 20",
        "1 in 1,000",
        "1 in 31,000",
        "less than 1 in 1,000,000,000",
    ]
