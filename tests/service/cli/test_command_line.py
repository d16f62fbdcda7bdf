"""Behavior that all commands share: exit statuses, streams, errors, questions, completion and unusual names."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from kith import Kith
from service.cli.terminal import print_json, print_line, print_note, remedy_lines
from service.cli.words import CONTROL_PATTERN, format_odds
from service.settings import Settings
from service.storage.repositories.store import Store
from tests.conftest import ROOT
from tests.databases import open_database
from tests.local_http import Handler, served_by
from tests.service.cli.conftest import Program, written


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
    run("identify", photos["text"], "-g", gallery, status=3)
    assert "(image_format)" in run.stderr


def test_errors_name_a_remedy(run: Program, server: str, gallery: str, photos: dict[str, Path]) -> None:
    run("gallery", "stats", gallery[:-1], status=3)
    for said in ("(gallery_not_found)", f"Did you mean '{gallery}'", f"Asked the server {server}."):
        assert said in run.stderr
    assert run("gallery", "stats", "missing", "--json", status=3) == ""
    problem = json.loads(run.stderr)
    assert (problem["code"], problem["asked"]) == ("gallery_not_found", f"the server {server}")
    assert "kith gallery create" in problem["remedy"]
    run("gallery", "stats", gallery, "--url", "http://127.0.0.1:9", status=3)
    assert "(unreachable)" in run.stderr
    run("gallery", "export", gallery, "folder-that-is-not/x.ndjson", status=3)
    assert "error: folder-that-is-not/x.ndjson: No such file or directory (file)\n  Check the path." in run.stderr
    run("identfy", photos["tom"], status=2)
    assert "error: No such command 'identfy'. Did you mean 'identify'? (usage)\n  See 'kith --help'." in run.stderr
    run("detect", "nowhere.jpg", "--json", status=2)
    problem = json.loads(run.stderr)
    assert (problem["code"], "nowhere.jpg" in problem["detail"]) == ("usage", True)
    assert problem["remedy"].startswith("See 'kith detect --help'")
    run("gallery", status=2)


def test_invalid_options_are_rejected_with_the_field(run: Program, gallery: str, photos: dict[str, Path]) -> None:
    create, of, tom = ("keys", "create", "foo", "--scope", "identify"), ("-g", gallery), photos["tom"]
    share = "Input should be less than or equal to 1"
    refused: list[tuple[int, tuple[str | Path, ...], str]] = [
        (2, ("verify", tom), ""),
        (2, ("identify", tom, *of, "--fpir", "0.1", "--fmr", "0.1"), "Give only one of these options"),
        (2, ("identify", tom, *of, "--fmr", "5"), share),
        (2, ("gallery", "risk", gallery, "--fpir", "0.1", "--fpir", "nan"), share),
        (2, ("identify", tom, photos["eileen"], *of, "--draw", "one.png"), ""),
        (2, (*create, "--rate", "1e9"), ""),
        (2, (*create, "--days", "inf"), ""),
        (2, ("keys", "rotate", "0" * 12, "--overlap-hours", "inf"), ""),
        (2, ("subject", "update", "ada", *of, "--set", "a=[1e999]"), ""),
        (2, ("subject", "update", "ada", *of), ""),
        (2, ("gallery", "update", gallery), ""),
        (3, ("gallery", "create", "a b"), "error: name: must be at most 64 letters, digits"),
        (3, ("jobs", "show", "nojob"), "error: job: must be 32 lowercase hexadecimal digits"),
        (3, ("audit", "list", "--since", "yesterday"), "error: since: must be a date like 2026-01-31"),
        (3, ("events", "--type", "nothing"), "type"),
        (3, ("subject", "show", "o'brien", *of), "list the subjects"),
    ]
    for status, words, said in refused:
        run(*words, status=status)
        assert said in run.stderr, words
        assert not said.startswith("error") or "--help lists the options" in run.stderr


def test_an_object_has_one_json_form(run: Program, gallery: str) -> None:
    """Every command prints an object as REST does, nulls included."""
    made = json.loads(run("gallery", "create", f"{gallery[:50]}-json", "--json"))
    assert made in json.loads(run("gallery", "list", "--json"))
    assert made["retention_days"] is None
    printed = json.loads(run("gallery", "stats", made["name"], "--json"))
    assert printed == made | {"drift": printed["drift"]}


def test_questions_need_an_answer_or_an_option(run: Program, kith: Kith, gallery: str) -> None:
    gallery = kith.create_gallery(f"{gallery[:50]}-too").name
    for answer, status, said in (
        ("", 2, "--yes"),
        ("\n", 1, "Nothing was changed"),
        ("n\n", 1, "Nothing was changed"),
    ):
        assert run("gallery", "delete", gallery, stdin=answer, status=status) == ""
        assert said in run.stderr
    assert gallery in kith.gallery_names()
    assert "receipt" in run("gallery", "delete", gallery, stdin="y\n")


def test_only_writing_creates_the_local_database(
    local: Program, server: str, tmp_path: Path, photos: dict[str, Path]
) -> None:
    del local.environment["KITH_MASTER_KEY"]
    tom, database = photos["tom"], tmp_path / "data" / "kith.db"
    (export := tmp_path / "staff.ndjson").touch()
    before = sorted(tmp_path.iterdir())
    reading: tuple[tuple[str | Path, ...], ...] = (
        ("identify", tom, "-g", "staff"),
        ("verify", tom, "--subject", "ada", "-g", "staff"),
        ("gallery", "import", "staff", export),
        ("subject", "enroll", "ada", tom, "-g", "staff"),
        ("jobs", "list"),
    )
    for command in reading:
        assert local(*command, status=3) == ""
        assert f"KITH_URL is not set, and there is no database at {database}" in local.stderr
        assert "Set KITH_URL or --url to your server's address" in local.stderr
    for command in (("backup", "b.kith"), ("audit", "verify"), ("master", "rotate")):
        assert local(*command, status=3, KITH_URL=server) == ""
        assert f"no database at {database}" in local.stderr
        assert "ignores KITH_URL" in local.stderr
    local("keys", "list", status=3)
    local("restore", "nowhere.kith", status=2)
    assert local("verify", photos["eileen"], photos["again"]).startswith("same: similarity")
    assert sorted(tmp_path.iterdir()) == before

    assert "With 100 people enrolled by one photo each and an FPIR of 0.01" in local("gallery", "create", "staff")
    assert f"Created a new database: {database}" in local.stderr
    local("gallery", "stats", "staf", status=3)
    assert f"Asked the database {database}, as KITH_URL is not set." in local.stderr
    verified = json.loads(local("audit", "verify", "--json", KITH_URL=server))
    assert f"This command ignores KITH_URL and uses the local database: {database}" in local.stderr
    assert (verified["faults"], verified["pruned"]) == ([], 0) and verified["lines"] > 0
    assert local("keys", "list").startswith("No API keys")
    token = local("keys", "create", "--scope", "admin")
    assert f"only for servers that use {database}." in local.stderr.replace("\n", " ")
    assert token.split("_")[1] in local("keys", "list")


def test_a_subject_is_enrolled_changed_and_erased(
    run: Program, gallery: str, photos: dict[str, Path], kith: Kith
) -> None:
    of = ("-g", gallery)
    assert "No subjects" in run("subject", "list", *of)
    printed = run("subject", "enroll", "ada", photos["eileen"], photos["coffee"], *of, "--name", "Ada", status=1)
    assert "1 of 2 photos enrolled as ada" in printed
    assert "no_face" in printed
    assert "--allow-duplicate" in run("subject", "enroll", "eve", photos["again"], photos["coffee"], *of, status=1)
    run("subject", "update", "ada", *of, "--name", "Countess", "--tag", "a", "--tag", "b", "--set", "room=12")
    updated = json.loads(run("subject", "update", "ada", *of, "--untag", "a", "--set", "floor=two", "--json"))
    (now,) = json.loads(run("subject", "list", *of, "--json"))
    assert updated == now
    assert (now["name"], now["tags"], now["metadata"]) == ("Countess", ["b"], {"room": 12, "floor": "two"})
    templates = json.loads(run("template", "list", "ada", *of, "--json"))["templates"]
    assert json.loads(run("subject", "show", "ada", *of, "--json")) == now | {"templates": templates}
    assert "Countess" in run("subject", "list", *of, "--tag", "b", "--where", "floor=two", "--find", "COUNT")
    assert "Nothing matches." in run("subject", "list", *of, "--find", "nobody")
    (template,) = [each["id"] for each in templates]
    assert template in run("template", "list", "ada", *of)
    kith.put_subject(gallery, "countess")
    assert "to countess" in run("template", "move", "ada", template, *of, "--to", "countess")
    assert "receipt" in run("template", "delete", "countess", template, *of, "--yes")
    receipt = json.loads(run("subject", "erase", "ada", *of, "-y", "--json"))
    assert receipt["id"] in run("erasures", "list", *of, "--json")
    # Ids are not cut in a narrow terminal.
    (audited,) = json.loads(run("audit", "list", *of, "--event", "subject_deleted", "--json"))
    assert audited["subject"] in run("audit", "list", *of, "--limit", "2", COLUMNS="80")


def test_embeddings_are_written_to_a_file(run: Program, photos: dict[str, Path], kith: Kith) -> None:
    listed = json.loads(run("embed", photos["eileen"], photos["tom"], "-o", "vectors.npy", "--json"))
    vectors = np.load(run.folder / "vectors.npy")
    assert [row["photo"] for row in listed["rows"]] == [str(photos["eileen"]), str(photos["tom"])]
    vector = kith.embed(photos["tom"]).images[0].faces[0].embedding or []
    assert (vectors.dtype, vectors.shape) == (np.float32, (2, len(vector)))
    assert np.allclose(vectors[1], vector, atol=1e-6)
    none = json.loads(run("embed", photos["coffee"], "-o", "none.npy", "--json", status=1))
    assert (none["file"], none["rows"], (run.folder / "none.npy").exists()) == (None, [], False)


def test_photos_are_drawn_and_never_overwritten(run: Program, gallery: str, photos: dict[str, Path]) -> None:
    folder, tom = run.folder, photos["tom"]
    more = {"tom.jpg": tom.read_bytes(), "tom-2.jpg": photos["coffee"].read_bytes()}
    written(folder / "more", more)
    run("identify", tom, folder / "more" / "tom.jpg", "-g", gallery, "--draw", "drawn", status=1)
    assert sorted(path.name for path in (folder / "drawn").iterdir()) == ["tom-2.jpg", "tom.jpg"]
    run("detect", tom, folder / "more", "--draw", "three", status=1)
    assert len(list((folder / "three").iterdir())) == 3
    (folder / "linked.png").symlink_to(tom)
    (folder / "same").mkdir()
    (folder / "same" / "tom.jpg").hardlink_to(tom)
    before = {name: path.read_bytes() for name, path in photos.items()}
    for target in (".", tom, "linked.png", "same"):
        run("detect", tom, "--draw", target, status=2)
        assert "of the photos" in run.stderr
    run("identify", photos["eileen"], tom, "-g", gallery, "--draw", folder, status=2)
    assert {name: path.read_bytes() for name, path in photos.items()} == before


def test_strangers_are_listed_named_merged_and_forgotten(
    run: Program, kith: Kith, gallery: str, photos: dict[str, Path]
) -> None:
    of = ("-g", gallery)
    assert "--remember-strangers-days" in run("stranger", "list", *of)
    run("gallery", "update", gallery, "--remember-strangers-days", "30")
    for name in ("eileen", "tom"):
        assert "visit 1" in run("identify", photos[name], "--faces", "largest", *of, status=1)
    tom, eileen = json.loads(run("stranger", "list", *of, "--json"))
    assert "seen 2 times" in run("stranger", "merge", tom["id"], "--into", eileen["id"], "--yes", *of)
    document = json.loads(run("stranger", "export", eileen["id"], *of))
    assert len(document["subject"]["templates"]) == 2
    promoted = run("stranger", "promote", eileen["id"], "ada", "--name", "Ada", *of)
    assert "Templates of ada: 2, of them the stranger's: 2" in promoted
    kith.delete_subject(gallery, "ada")
    for words in ("--all", "{}"):
        run("identify", photos["tom"], "--faces", "largest", *of, status=1)
        (again,) = kith.strangers(gallery)
        run("stranger", "forget", again.id, "--all", *of, status=2)
        assert "receipt" in run("stranger", "forget", words.format(again.id), "--yes", *of)
    run("gallery", "update", gallery, "--remember-strangers-days", "0")
    assert kith.gallery(gallery).remember_strangers_days is None


@contextmanager
def refusing(server: str, refused: Callable[[str], bool], status: int = 409) -> Iterator[str]:
    """Yield the address of a proxy that fails the requests whose path ``refused`` selects."""

    class Proxy(Handler):
        def forward(self) -> None:
            if refused(self.path):
                self.close_connection = True
                return self.answer(status, b'{"code": "torn", "detail": "Failed.", "remedy": "Retry."}')
            headers = {"Content-Type": self.headers.get("Content-Type", "")}
            answer = httpx.request(self.command, f"{server}{self.path}", content=self.read_body(), headers=headers)
            return self.answer(answer.status_code, answer.content, {"Content-Type": "application/json"})

        do_GET = do_POST = forward

    with served_by(Proxy) as url:
        yield url


def test_what_was_done_before_an_error_is_printed(
    server: str, run: Program, gallery: str, photos: dict[str, Path]
) -> None:
    requests, served = itertools.count(1), iter([True, False])
    two = (photos["eileen"], photos["again"])
    with refusing(server, lambda _: next(requests) % 2 == 0) as url:
        for command in ("detect", "embed"):
            printed = json.loads(run(command, *two, "--json", "--url", url, status=3))
            assert list(printed.get("photos", printed)) == [str(photos["eileen"])]
            assert json.loads(run.stderr)["code"] == "torn"
        run("embed", *two, "-o", "some.npy", "--url", url, status=3)
        assert len(np.load(run.folder / "some.npy")) == 1
    with refusing(server, lambda path: "/templates" in path and not next(served, False), 500) as url:
        printed = run("subject", "enroll", "ada", *two, "-g", gallery, "--url", url, status=3)
    assert printed.splitlines() == [
        "1 of 2 photos enrolled as ada",
        f"  {photos['eileen']}: enrolled",
        f"  {photos['again']}: result unknown. Check with 'kith subject show'.",
    ]
    (run.folder / "people" / "ada").mkdir(parents=True)
    photos["eileen"].rename(run.folder / "people" / "ada" / "1.jpg")
    with refusing(server, lambda path: "/enrollments" in path) as url:
        run("enroll", "people", "-g", gallery, "--report", "report.csv", "--url", url, "--json", status=3)
    assert "run the command again to resume" in json.loads(run.stderr)["remedy"]
    assert (run.folder / "report.csv").read_text().startswith("photo,status")
    assert (run.folder / "report.csv").stat().st_mode & 0o777 == 0o600  # folders are named after people


def test_a_closed_pipe_ends_without_a_message(run: Program) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    process = run.start("models", "list", stdout=writable)
    os.close(writable)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 141)


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
    problems = [{"code": "no_face", "remedy": "Turn it."}, {"code": "low_quality", "remedy": "Photo 0."}]
    assert remedy_lines([*problems, {"code": "low_quality", "remedy": "Photo 1."}, {"code": "without_remedy"}]) == [
        "no_face: Turn it.",
        "low_quality: Photo 0.",
    ]


NAME = "Ada\x1b[2J\nerror: \x9b5m\u202eadA"
SHOWN = "Ada\ufffd[2J"
TAG = "\x1b]0;title\x07"
WRITTEN = "\u0645\u06cc\u200c\u062e 山田\u3000太郎 O\u2019Neil \u200f\u05d0 👩\u200d🔬"
"""What names are written with."""


def test_stored_names_are_read_as_they_are_and_shown_as_text(
    run: Program, kith: Kith, gallery: str, settings: Settings, photos: dict[str, Path]
) -> None:
    kith.enroll(gallery, "ada", photos["eileen"])
    with closing(open_database(settings.sql_url)) as database:
        store = Store(database)
        store.subjects.put(store.galleries.get(gallery), "ada", NAME, {"k": NAME}, [TAG])
    identify = ("identify", photos["eileen"], "--draw", "out.png")
    for command in (("subject", "list"), ("subject", "show", "ada"), identify):
        shown = run(*command, "-g", gallery)
        assert SHOWN in shown
        assert not CONTROL_PATTERN.search((shown + run.stderr).replace("\n", ""))
        told = run(*command, "-g", gallery, "--json")
        assert not CONTROL_PATTERN.search(told.replace("\n", ""))
        assert json.dumps(NAME)[1:-1] in json.dumps(json.loads(told))
    with Image.open(run.folder / "out.png") as drawn:
        assert min(drawn.size) >= 1280


def test_messages_are_text_in_lines_of_our_own(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("one\ntwo\x1b[2J")
    print_line(WRITTEN)
    print_note("three\x9b")
    print_json({"name": "\x9b\u202e\x7f\n", "list": ["é"]})
    printed = capsys.readouterr()
    assert printed.out.startswith(f"one\ntwo\ufffd[2J\n{WRITTEN}\n")
    assert printed.err == "three\ufffd\n"
    document = printed.out.partition(f"{WRITTEN}\n")[2]
    assert json.loads(document) == {"name": "\x9b\u202e\x7f\n", "list": ["é"]}
    assert document.isascii() is False
    assert not CONTROL_PATTERN.search(document.replace("\n", ""))
