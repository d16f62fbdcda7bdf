"""Commands against a real server and against the local database."""

from __future__ import annotations

import base64
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

from kith import Kith
from service.core.errors import SettingsError
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.service.cli.conftest import Program


def test_what_is_enrolled_locally_is_served(local: Program, photos: dict[str, Path]) -> None:
    for number, name in enumerate(("eileen", "coffee")):
        (local.folder / "people" / "Eilèen [b]").mkdir(parents=True, exist_ok=True)
        (local.folder / "people" / "Eilèen [b]" / f"{number}.jpg").write_bytes(photos[name].read_bytes())
    created = local("enroll", "people", "--gallery", "g", status=1)  # a photo was refused
    assert "Created gallery g. With 100 people" in created
    assert "no_face" in created
    assert "0 photos enrolled, 1 already enrolled, 1 refused" in local("enroll", "people", "-g", "g", status=1)
    with embedded(load_settings(data_dir=local.folder / "data", log_level="WARNING")) as url:
        local.environment["KITH_URL"] = url
        jobs = json.loads(local("jobs", "list", "-g", "g", "--json"))
        assert [job["counts"] for job in jobs] == [{"already_enrolled": 1, "no_face": 1}, {"enrolled": 1, "no_face": 1}]
        assert "no_face" in local("jobs", "show", jobs[0]["id"])
        answer = json.loads(local("identify", photos["again"], "-g", "g", "--json"))
        assert answer[str(photos["again"])]["results"][0]["subject"] == "Eilèen [b]"
        assert "fpir 0.01" in local("gallery", "list")
        assert local("gallery", "delete", "g", "--yes").startswith("Deleted. Subjects: 1,")


def test_commands_choose_the_detail(run: Program, gallery: str, astronaut: NDArray[Any]) -> None:
    photo = run.folder / "people" / "eileen" / "sideways.jpg"
    photo.parent.mkdir(parents=True)
    # The detector finds a large sideways face.
    small = np.asarray(cv2.resize(astronaut, None, fx=0.35, fy=0.35, interpolation=cv2.INTER_AREA), np.uint8)
    photo.write_bytes(jpeg(small.transpose(1, 0, 2)[:, ::-1], 95))
    of = ("-g", gallery)
    assert "no_face" in run("enroll", "people", *of, "--detail", "low", status=1)
    run("enroll", "people", *of)
    for command in (("detect",), ("embed",), ("identify", *of), ("verify", str(photo))):
        for detail, status in (("low", 1), ("high", 0)):
            run(*command, photo, "--detail", detail, status=status)


def test_a_folder_of_photos_is_searched_at_any_depth(
    run: Program, kith: Kith, gallery: str, photos: dict[str, Path]
) -> None:
    kith.enroll(gallery, "eileen", photos["eileen"])
    album = run.folder / "album"
    (album / "2026" / "may").mkdir(parents=True)
    files = {"2026/may/1.jpg": "eileen", "2026/2.jpg": "text", "3.jpg": "coffee", "notes.txt": "text"}
    for name, photo in files.items():
        (album / name).write_bytes(photos[photo].read_bytes())
    (album / "gone.jpg").symlink_to(album / "missing.jpg")
    found = run("identify", album, "-g", gallery, status=1)  # two photos cannot be read
    assert all(str(path) in found for path in album.rglob("*.jpg"))
    assert "2 photos of 4 cannot be read" in run.stderr
    assert "1 file ignored" in run.stderr
    answers = json.loads(run("identify", album, "-g", gallery, "--json", status=1))
    assert answers[str(album / "2026" / "may" / "1.jpg")]["results"][0]["subject"] == "eileen"
    assert answers[str(album / "gone.jpg")]["error"]["code"] == "unreadable"
    for command in ("detect", "embed", "identify"):
        document = answers if command == "identify" else json.loads(run(command, album, "--json", status=1))
        listed = document.get("photos", document)
        assert (len(listed), len({frozenset(photo) for photo in listed.values()})) == (4, 1), "equal fields"
    (run.folder / "nothing").mkdir()
    run("identify", "nothing", "-g", gallery, status=2)
    assert "no photos" in run.stderr


def test_gallery_update_changes_only_the_given_settings(run: Program, kith: Kith, gallery: str) -> None:
    changed = run("gallery", "update", gallery, "--retention-days", "30", "--fpir", "0.01", "--keep-crops")
    assert changed == f"Updated gallery {gallery}: risk, keep_crops, retention_days\n"
    now = kith.gallery(gallery)
    assert (now.retention_days, now.risk, now.keep_crops) == (30, {"fpir": 0.01}, True)
    run("gallery", "update", gallery, "--retention-days", "0", "--liveness", "off")
    now = kith.gallery(gallery)
    assert (now.retention_days, now.liveness, now.keep_crops) == (None, "off", True)
    run("gallery", "update", gallery, "--liveness", "required", status=3)
    assert "liveness_unavailable" in run.stderr  # of the bundled pack
    run("gallery", "update", gallery, status=2)
    run("gallery", "update", gallery, "--liveness", "perhaps", status=2)


def test_a_missing_api_key_is_reported_with_its_option(local: Program) -> None:
    settings = load_settings(data_dir=local.folder / "data", api_key="k" * 32, log_level="WARNING")
    with embedded(settings) as url:
        local("gallery", "list", "--url", url, status=3)
    assert "--api-key" in local.stderr and "KITH_CLIENT_KEY" in local.stderr


def test_ctrl_c_cancels_the_enrollment_of_an_archive(
    run: Program, kith: Kith, gallery: str, astronaut: NDArray[Any]
) -> None:
    photo = jpeg(astronaut)
    with zipfile.ZipFile(run.folder / "people.zip", "w") as file:
        for number in range(300):
            file.writestr(f"eileen/{number:03}.jpg", photo + number.to_bytes(4))
    process = run.start("enroll", "people.zip", "-g", gallery, "--json", "--report", "report.ndjson")
    while not any(job.done_count for job in kith.jobs(gallery)):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (130, False)
    report = json.loads(output)
    assert report["interrupted"]
    assert kith.gallery(gallery).template_count == report["enrolled_count"] < 300
    assert [job.state for job in kith.jobs(gallery)] == ["canceled"]
    lines = (run.folder / "report.ndjson").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["done"] * report["enrolled_count"]


def test_a_missing_or_wrong_master_key_is_reported_before_serving(local: Program) -> None:
    local("gallery", "create", "g")
    another = {"KITH_MASTER_KEY": base64.b64encode(bytes(32)).decode()}
    for environment in (another, another | {"KITH_MASTER_KEY_FILE": str(local.folder / "absent.key")}):
        for command in (("gallery", "list"), ("keys", "list")):
            local(*command, status=3, **environment)
            assert len(local.stderr.splitlines()) < 5
            assert "KITH_MASTER_KEY_FILE; docs/privacy.md" in local.stderr.replace("\n", " ")
    # 'serve' changes the memory limits of its process.
    served = [sys.executable, "-m", "service.cli.main", "serve", "--port", "0"]
    environment = os.environ | another
    done = subprocess.run(served, cwd=local.folder, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "docs/privacy.md" in done.stderr, "Traceback" in done.stderr) == (3, True, False)


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


def test_gallery_risk_prints_thresholds(run: Program, kith: Kith, gallery: str, photos: dict[str, Path]) -> None:
    for name in ("eileen", "tom"):
        kith.enroll(gallery, name, photos[name])
    assert "2 subjects" in run("calibrate", "-g", gallery)
    assert "0.02" in run("gallery", "risk", gallery, "--fpir", "0.02")
    report = json.loads(run("gallery", "risk", gallery, "--json"))
    assert report["evidence"]["pair_count"] == 1
    (moved, *_) = json.loads(run("audit", "list", "-g", gallery, "--event", "threshold_moved", "--json"))
    assert moved["details"]["after"]["threshold"] == report["threshold"]
    assert "threshold_moved" in run("audit", "list", "-g", gallery)
