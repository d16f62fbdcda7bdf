"""Commands against a real server and against the local database."""

from __future__ import annotations

import base64
import csv
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from service.core.errors import SettingsError
from service.server import embedded
from service.settings import load_settings
from tests.commands import run_kith
from tests.conftest import jpeg


def kith_command(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_kith(*arguments, cwd=cwd, environment=with_defaults(environment))


def kith_process(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run kith in a separate process, with the default engine."""
    command = [sys.executable, "-m", "service.cli.main", *arguments]
    env = with_defaults(environment)
    del env["KITH_RUNTIME"]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def with_defaults(environment: dict[str, str]) -> dict[str, str]:
    return os.environ | {"KITH_LOG_LEVEL": "WARNING", "COLUMNS": "200"} | environment


@pytest.fixture
def people(tmp_path: Path, astronaut: NDArray[Any], actor: NDArray[Any], nobody: NDArray[Any]) -> Path:
    for name, photo in (("eileen", astronaut), ("Tøm [b]", actor)):
        (tmp_path / "people" / name).mkdir(parents=True)
        (tmp_path / "people" / name / "1.jpg").write_bytes(jpeg(photo))
    (tmp_path / "people" / "Tøm [b]" / "2.jpg").write_bytes(jpeg(nobody))
    return tmp_path / "people"


def test_embedded_enroll_resume_identify_verify(people: Path, tmp_path: Path, astronaut: NDArray[Any]) -> None:
    first = kith_command("enroll", str(people), "--gallery", "g", "--json", cwd=tmp_path)
    assert first.returncode == 1, first.stderr  # a photo was refused
    report = json.loads(first.stdout)
    assert (report["enrolled_count"], report["already_enrolled_count"]) == (2, 0)
    assert [(r["photo"], r["code"]) for r in report["refused"]] == [(str(people / "Tøm [b]" / "2.jpg"), "no_face")]
    again = kith_command("enroll", str(people), "--gallery", "g", "--report", "report.csv", cwd=tmp_path)
    assert "0 photos enrolled, 2 already enrolled, 1 refused" in again.stdout
    assert "no_face" in again.stdout
    with (tmp_path / "report.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows].count("done") == 2
    probe = tmp_path / "probe.jpg"
    probe.write_bytes(jpeg(astronaut[:, ::-1], 60))
    (tmp_path / "one" / "eileen").mkdir(parents=True)
    (tmp_path / "one" / "eileen" / "1.jpg").write_bytes(probe.read_bytes())
    one = kith_command("enroll", str(tmp_path / "one"), "--gallery", "one", cwd=tmp_path)
    assert one.stdout.startswith("1 photo enrolled, 0 refused")
    assert "Created gallery one. With 100 people" in one.stdout
    found = kith_command("identify", str(probe), "-g", "g", "--draw", "out.png", cwd=tmp_path)
    assert "eileen" in found.stdout, found.stderr
    with Image.open(tmp_path / "out.png") as drawn:
        assert min(drawn.size) >= 1280
        assert drawn.convert("RGB").getcolors(2**24) != Image.open(probe).convert("RGB").getcolors(2**24)

    with embedded(load_settings(data_dir=tmp_path / "data", log_level="WARNING")) as url:

        def printed(*words: str) -> str:
            return kith_command(*words, cwd=tmp_path, KITH_URL=url).stdout

        jobs = json.loads(printed("jobs", "list", "-g", "g", "--json"))
        assert [job["counts"] for job in jobs] == [{"already_enrolled": 2, "no_face": 1}, {"enrolled": 2, "no_face": 1}]
        assert "no_face" in printed("jobs", "show", jobs[0]["id"])
        stats = json.loads(printed("gallery", "stats", "g", "--json"))
        assert (stats["subject_count"], stats["template_count"]) == (2, 2)  # the second run stored nothing twice
        answer = json.loads(printed("identify", str(probe), "-g", "g", "--json"))
        assert answer[str(probe)]["results"][0]["subject"] == "eileen"
        assert printed("verify", str(probe), str(people / "eileen" / "1.jpg")).startswith("same")
        assert "fpir 0.01" in printed("gallery", "list")
        assert printed("gallery", "delete", "g", "--yes").startswith("Deleted 2 subjects")


def test_a_threshold_of_an_unknown_risk_promises_nothing(server: str, kith: Kith, tmp_path: Path) -> None:
    fixed = kith_command("gallery", "create", "fixed", "--threshold", "0.9", "--url", server, cwd=tmp_path)
    assert fixed.stdout == "Created gallery fixed.\n"
    kith.delete_gallery("fixed")
    assert not (tmp_path / "data").exists()


def test_commands_choose_the_detail(
    server: str, kith: Kith, gallery: str, tmp_path: Path, astronaut: NDArray[Any]
) -> None:
    photo = tmp_path / "people" / "eileen" / "sideways.jpg"
    photo.parent.mkdir(parents=True)
    # The detector finds a large sideways face.
    small = np.asarray(cv2.resize(astronaut, None, fx=0.35, fy=0.35, interpolation=cv2.INTER_AREA), np.uint8)
    photo.write_bytes(jpeg(small.transpose(1, 0, 2)[:, ::-1], 95))
    at, of = ("--url", server), ("--gallery", gallery)
    folder = str(tmp_path / "people")
    assert "no_face" in kith_command("enroll", folder, *of, *at, "--detail", "low", cwd=tmp_path).stdout
    assert kith_command("enroll", folder, *of, *at, cwd=tmp_path).returncode == 0
    for command in (("detect",), ("embed",), ("identify", *of), ("verify", str(photo))):
        for detail, status in (("low", 1), ("high", 0)):
            done = kith_command(*command, str(photo), *at, "--detail", detail, cwd=tmp_path)
            assert done.returncode == status, (command, detail)


def test_a_folder_of_photos_is_searched_at_any_depth(
    server: str, kith: Kith, gallery: str, tmp_path: Path, astronaut: NDArray[Any], nobody: NDArray[Any]
) -> None:
    kith.enroll(gallery, "eileen", jpeg(astronaut))
    album = tmp_path / "album"
    (album / "2026" / "may").mkdir(parents=True)
    good, broken, empty = album / "2026" / "may" / "1.jpg", album / "2026" / "2.jpg", album / "3.jpg"
    gone = album / "gone.jpg"
    good.write_bytes(jpeg(astronaut))
    broken.write_bytes(b"no photo")
    empty.write_bytes(jpeg(nobody))
    (album / "notes.txt").write_text("text")
    gone.symlink_to(album / "missing.jpg")
    at, of = ("--url", server), ("-g", gallery)
    done = kith_command("identify", str(album), *of, *at, cwd=tmp_path)
    assert done.returncode == 1, done.stderr  # two photos cannot be read
    assert all(str(path) in done.stdout for path in (good, broken, empty, gone)), done.stdout
    assert "2 photos of 4 cannot be read" in done.stderr
    assert "1 file ignored" in done.stderr
    answers = json.loads(kith_command("identify", str(album), *of, *at, "--json", cwd=tmp_path).stdout)
    assert len(answers) == 4
    assert len({frozenset(answer) for answer in answers.values()}) == 1
    assert len({frozenset(result) for answer in answers.values() for result in answer["results"]}) == 1
    assert answers[str(good)]["results"][0]["subject"] == "eileen"
    assert (answers[str(gone)]["error"]["code"], answers[str(good)]["error"]) == ("unreadable", None)
    for command in ("detect", "embed"):
        done = kith_command(command, str(album), *at, "--json", cwd=tmp_path)
        document = json.loads(done.stdout)
        photos = document.get("photos", document)
        assert (done.returncode, len(photos)) == (1, 4)
        assert len({frozenset(photo) for photo in photos.values()}) == 1
    broken.unlink()
    gone.unlink()
    assert kith_command("identify", str(album), *of, *at, cwd=tmp_path).returncode == 0
    (tmp_path / "nothing").mkdir()
    assert "no photos" in kith_command("identify", str(tmp_path / "nothing"), *of, *at, cwd=tmp_path).stderr


def test_gallery_update_changes_only_the_given_settings(server: str, kith: Kith, gallery: str, tmp_path: Path) -> None:
    def update(*options: str) -> subprocess.CompletedProcess[str]:
        return kith_command("gallery", "update", gallery, *options, "--url", server, cwd=tmp_path)

    changed = update("--retention-days", "30", "--fpir", "0.01", "--keep-crops")
    assert changed.stdout == f"Updated gallery {gallery}: risk, keep_crops, retention_days\n", changed.stderr
    now = kith.gallery(gallery)
    assert (now.retention_days, now.risk, now.keep_crops) == (30, {"fpir": 0.01}, True)
    assert update("--retention-days", "0", "--liveness", "off").returncode == 0
    now = kith.gallery(gallery)
    assert (now.retention_days, now.liveness, now.keep_crops) == (None, "off", True)
    assert "liveness_unavailable" in update("--liveness", "required").stderr  # of the bundled pack
    assert (update().returncode, update("--liveness", "perhaps").returncode) == (2, 2)


def test_ids_are_not_cut_in_a_narrow_terminal(server: str, kith: Kith, gallery: str, tmp_path: Path) -> None:
    kith.put_subject(gallery, "ada")
    kith.delete_subject(gallery, "ada")
    listed = ("audit", "list", "-g", gallery, "--url", server)
    who = json.loads(kith_command(*listed, "--limit", "2", "--json", cwd=tmp_path).stdout)
    assert len(who) == 2
    who = json.loads(kith_command(*listed, "--event", "subject_deleted", "--json", cwd=tmp_path).stdout)
    printed = kith_command(*listed, cwd=tmp_path, COLUMNS="80").stdout
    assert printed.count(who[0]["subject"]) == 2
    assert "subject_deleted" in printed


def test_a_missing_api_key_is_reported_with_its_option(tmp_path: Path) -> None:
    with embedded(load_settings(data_dir=tmp_path / "data", api_key="k" * 32, log_level="WARNING")) as url:
        done = kith_command("gallery", "list", "--url", url, cwd=tmp_path)
    assert (done.returncode, "--api-key" in done.stderr, "KITH_CLIENT_KEY" in done.stderr) == (3, True, True)


def test_ctrl_c_cancels_the_enrollment_of_an_archive(
    server: str, kith: Kith, gallery: str, tmp_path: Path, astronaut: NDArray[Any]
) -> None:
    archive, photo = tmp_path / "people.zip", jpeg(astronaut)
    with zipfile.ZipFile(archive, "w") as file:
        for number in range(300):
            file.writestr(f"eileen/{number:03}.jpg", photo + number.to_bytes(4))
    command = [sys.executable, "-m", "service.cli.main", "enroll", str(archive), "-g", gallery, "--url", server]
    process = subprocess.Popen(
        [*command, "--json", "--report", "report.ndjson"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not any(job.done_count for job in kith.jobs(gallery)):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, b"Traceback" in errors) == (130, False)
    report = json.loads(output)
    assert report["interrupted"]
    assert kith.gallery(gallery).template_count == report["enrolled_count"] < 300
    assert [job.state for job in kith.jobs(gallery)] == ["canceled"]
    lines = (tmp_path / "report.ndjson").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["done"] * report["enrolled_count"]


def test_settings_of_a_server_that_cannot_start_are_named(tmp_path: Path) -> None:
    exposed = kith_process("serve", "--host", "0.0.0.0", "--port", "0", cwd=tmp_path)  # noqa: S104
    wrong = kith_command("serve", cwd=tmp_path, KITH_PORT="none")
    pack = kith_process("serve", cwd=tmp_path, KITH_PACK="/nowhere")
    for done, status, said in (
        (exposed, 2, "KITH_API_KEY"),
        (wrong, 2, "KITH_PORT"),
        (pack, 3, "/nowhere is not a directory"),
    ):
        assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (status, True, False), done.stderr


def test_a_missing_or_wrong_master_key_is_reported_before_serving(tmp_path: Path) -> None:
    made = kith_command("gallery", "create", "g", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    another = {"KITH_MASTER_KEY": base64.b64encode(bytes(32)).decode()}
    for environment in (another, another | {"KITH_MASTER_KEY_FILE": str(tmp_path / "absent.key")}):
        for command in (("serve", "--port", "0"), ("gallery", "list"), ("keys", "list")):
            # 'serve' changes the memory limits of its process.
            run = kith_process if command[0] == "serve" else kith_command
            done = run(*command, cwd=tmp_path, **environment)
            assert done.returncode == 3, done.stderr
            assert "Traceback" not in done.stderr
            assert len(done.stderr.splitlines()) < 5
            assert "KITH_MASTER_KEY_FILE; docs/privacy.md" in done.stderr.replace("\n", " ")


def test_serving_a_network_needs_an_api_key() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        load_settings(host=host).check_exposure(lambda: False)
    for host in ("0.0.0.0", "::", "192.168.1.5", "kith.example"):  # noqa: S104
        with pytest.raises(SettingsError, match="KITH_API_KEY"):
            load_settings(host=host).check_exposure(lambda: False)
        load_settings(host=host).check_exposure(lambda: True)
        load_settings(host=host, api_key="k" * 32).check_exposure(lambda: False)
        with pytest.raises(SettingsError, match="KITH_API_KEY: it is empty: give it a value, or leave"):
            load_settings(host=host, api_key="")  # an unset variable of a compose file must not open the service
        load_settings(host=host, allow_anonymous=True).check_exposure(lambda: False)


def test_gallery_risk_prints_thresholds(server: str, gallery: str, people: Path, tmp_path: Path) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return kith_command(*words, cwd=tmp_path, KITH_URL=server)

    assert command("enroll", str(people), "-g", gallery).returncode == 1  # a photo was refused
    derived = command("calibrate", "-g", gallery)
    assert derived.returncode == 0, derived.stderr
    assert "2 subjects" in derived.stdout
    printed = command("gallery", "risk", gallery, "--fpir", "0.02")
    assert printed.returncode == 0, printed.stderr
    assert "0.02" in printed.stdout
    report = json.loads(command("gallery", "risk", gallery, "--json").stdout)
    assert report["evidence"]["pair_count"] == 1
    lines = json.loads(command("audit", "list", "-g", gallery, "--event", "threshold_moved", "--json").stdout)
    assert lines[0]["details"]["after"]["threshold"] == report["threshold"]
    assert "threshold_moved" in command("audit", "list", "-g", gallery).stdout
