"""Commands against a real server and against the local database."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from kith import Kith
from service.cli.terminal import print_first
from service.cli.tools.doctor import check_conflicts, diagnose
from service.core.errors import SettingsError
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.service.cli.conftest import Program, written
from tests.service.usecases.test_bulk_enrollment import as_zip


def test_what_is_enrolled_locally_is_served(local: Program, photos: dict[str, Path]) -> None:
    names = ("eileen", "coffee")
    written(local.folder / "people" / "Eilèen [b]", {f"{name}.jpg": photos[name].read_bytes() for name in names})
    created = local("enroll", "people", "--gallery", "g", status=1)  # a photo was refused
    assert "Created gallery g. With 100 people" in created
    assert "no_face" in created
    assert "0 photos enrolled, 1 already enrolled, 1 refused" in local("enroll", "people", "-g", "g", status=1)
    with embedded(load_settings(data_dir=local.folder / "data", log_level="WARNING")) as url:
        local.environment["KITH_URL"] = url
        jobs = json.loads(local("jobs", "list", "-g", "g", "--json"))
        assert [job["counts"] for job in jobs] == [{"already_enrolled": 1, "no_face": 1}, {"enrolled": 1, "no_face": 1}]
        assert "no_face" in local("jobs", "show", jobs[0]["id"])
        assert "succeeded" in local("jobs", "watch", jobs[0]["id"], status=1)
        answer = json.loads(local("identify", photos["again"], "-g", "g", "--json"))
        assert answer[str(photos["again"])]["results"][0]["subject"] == "Eilèen [b]"
        assert "fpir 0.01" in local("gallery", "list")
        assert local("gallery", "delete", "g", "--yes").startswith("Deleted. Subjects: 1,")


def test_a_folder_of_photos_is_searched_at_any_depth(
    run: Program, kith: Kith, gallery: str, photos: dict[str, Path]
) -> None:
    kith.enroll(gallery, "eileen", photos["eileen"])
    files = {"2026/may/1.jpg": "eileen", "2026/2.jpg": "text", "3.jpg": "coffee", "notes.txt": "text"}
    written(run.folder / "album", {name: photos[photo].read_bytes() for name, photo in files.items()})
    (run.folder / "album" / "gone.jpg").symlink_to("missing.jpg")
    found = run("identify", "album", "-g", gallery, status=1)  # two photos cannot be read
    assert "2 photos of 4 cannot be read" in run.stderr
    assert "1 file ignored" in run.stderr
    answers = json.loads(run("identify", "album", "-g", gallery, "--json", status=1))
    assert answers["album/2026/may/1.jpg"]["results"][0]["subject"] == "eileen"
    assert answers["album/gone.jpg"]["error"]["code"] == "unreadable"
    for command in ("detect", "embed", "identify"):
        document = answers if command == "identify" else json.loads(run(command, "album", "--json", status=1))
        listed = document.get("photos", document)
        assert (len(listed), len({frozenset(photo) for photo in listed.values()})) == (4, 1), "equal fields"
        assert all(name in found for name in listed)
    (run.folder / "nothing").mkdir()
    run("identify", "nothing", "-g", gallery, status=2)
    assert "no photos" in run.stderr


def test_gallery_update_changes_only_the_given_settings(run: Program, kith: Kith, gallery: str) -> None:
    changed = run("gallery", "update", gallery, "--retention-days", "30", "--fpir", "0.01", "--keep-crops")
    assert changed == f"Updated gallery {gallery}: risk, keep_crops, retention_days\n"
    run("gallery", "update", gallery, "--retention-days", "0", "--liveness", "off")
    now = kith.gallery(gallery)
    assert (now.retention_days, now.liveness, now.risk, now.keep_crops) == (None, "off", {"fpir": 0.01}, True)


def test_ctrl_c_cancels_the_enrollment_of_an_archive(
    run: Program, kith: Kith, gallery: str, photos: dict[str, Path]
) -> None:
    photo, refused = photos["tom"].read_bytes(), {"anna/1.jpg": photos["coffee"].read_bytes()}
    people = refused | {f"tom/{n:03}.jpg": photo + n.to_bytes(4) for n in range(300)}
    (run.folder / "people.zip").write_bytes(as_zip(people))
    process = run.start("enroll", "people.zip", "-g", gallery, "--json", "--report", "report.ndjson")
    while not any(job.done_count for job in kith.jobs(gallery)):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (130, False)
    report = json.loads(output)
    assert report["interrupted"]
    assert report["without_photo"] == [], "other photos of hers may not have been tried yet"
    assert kith.gallery(gallery).template_count == report["enrolled_count"] < 300
    assert [job.state for job in kith.jobs(gallery)] == ["canceled"]
    lines = (run.folder / "report.ndjson").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["refused", *["done"] * report["enrolled_count"]]


def test_serving_a_network_needs_an_api_key() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        load_settings(host=host).check_exposure(lambda: False)
    for host in ("0.0.0.0", "::", "192.168.1.5", "kith.example"):  # noqa: S104
        with pytest.raises(SettingsError, match="KITH_API_KEY"):
            load_settings(host=host).check_exposure(lambda: False)
        load_settings(host=host).check_exposure(lambda: True)
        load_settings(host=host, api_key="k" * 32).check_exposure(lambda: False)
        load_settings(host=host, allow_anonymous=True).check_exposure(lambda: False)
    with pytest.raises(SettingsError, match="KITH_API_KEY: it is empty: give it a value, or leave"):
        load_settings(api_key="")  # an unset variable of a compose file must not open the service


def test_gallery_risk_prints_thresholds(run: Program, kith: Kith, gallery: str, photos: dict[str, Path]) -> None:
    for name in ("eileen", "tom"):
        kith.enroll(gallery, name, photos[name])
    assert "2 subjects" in run("calibrate", "-g", gallery)
    assert "0.02" in run("gallery", "risk", gallery, "--fpir", "0.02")
    report = json.loads(run("gallery", "risk", gallery, "--json"))
    (moved, *_) = json.loads(run("audit", "list", "-g", gallery, "--event", "threshold_moved", "--json"))
    assert moved["details"]["after"]["threshold"] == report["threshold"]


LATIN1 = os.fsdecode(b"Ren\xe9")


def test_every_file_is_accounted_for(run: Program, gallery: str, tmp_path: Path, photos: dict[str, Path]) -> None:
    photo = photos["eileen"].read_bytes()
    files = {
        "eileen/1.jpe": photo,
        "eileen/2019/IMG_2": photo + b"2",
        f"eileen/{LATIN1}.jpg": photo + b"3",
        f"{LATIN1}/1.jpg": photo,
        f"{LATIN1}/notes.txt": b"no photo",
        "eileen/[b]notes.txt": b"no photo",
        "eileen/._1.jpg": b"\0\5\x16\7",
        "__MACOSX/eileen/1.jpg": photo,
        "group.jpg": photo,
        "anna/1.jpg": jpeg(np.full((300, 300, 3), 128, np.uint8)),
        "tom/1.jpg": photos["tom"].read_bytes(),
    }
    written(tmp_path / "people", files)
    (tmp_path / "people" / "eileen" / "gone.jpg").symlink_to("nowhere")
    words = ("enroll", "people", "-g", gallery, "--report", "report.csv")
    first, *lines = run(*words, status=1).splitlines()
    assert first == "1 person has no photo in the gallery, and cannot be found: anna"
    assert "Ignored: people/eileen/[b]notes.txt" in lines
    assert lines[-1] == "4 photos enrolled, 4 refused; 4 files ignored (hidden, or not a photo)"
    with (tmp_path / "report.csv").open(newline="", encoding="utf-8") as stream:
        rows = {row["photo"]: (row["status"], row["code"]) for row in csv.DictReader(stream)}
    assert rows == {
        "people/Ren\\xe9/notes.txt": ("ignored", ""),
        "people/eileen/[b]notes.txt": ("ignored", ""),
        "people/eileen/gone.jpg": ("refused", "unreadable"),
        "people/group.jpg": ("refused", "invalid_request"),
        "people/Ren\\xe9/1.jpg": ("refused", "invalid_request"),
        "people/anna/1.jpg": ("refused", "no_face"),
        "people/eileen/1.jpe": ("done", ""),
        "people/eileen/2019/IMG_2": ("done", ""),
        "people/eileen/Ren\\xe9.jpg": ("done", ""),
        "people/tom/1.jpg": ("done", ""),
    }
    # A person who was enrolled before is not missing because of another, refused photo.
    (tmp_path / "people" / "tom" / "1.jpg").write_bytes(files["anna/1.jpg"] + b"2")
    again = json.loads(run(*words, "--json", status=1))
    assert (again["already_enrolled_count"], len(again["refused"]), again["ignored_count"]) == (3, 5, 4)
    assert again["ignored_files"] == ["people/Ren\\xe9/notes.txt", "people/eileen/[b]notes.txt"]
    assert again["without_photo"] == ["anna"]


def test_a_source_without_folders_of_people_is_refused(run: Program, photos: dict[str, Path]) -> None:
    written(run.folder / "flat", {".git/config": b"", "1.jpg": b"photo"})
    run("enroll", "flat", "-g", "none", status=2)
    assert "has no folder per person" in run.stderr
    run("enroll", photos["tom"].name, "-g", "none", status=2)
    assert "kith subject enroll ID tom.jpg -g none" in " ".join(run.stderr.replace("│", " ").split())


def test_ten_of_many_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_first("Refused", [f"{number}.jpg" for number in range(12)], ". All: --report FILE.")
    *lines, rest = capsys.readouterr().out.splitlines()
    assert lines == [f"Refused: {number}.jpg" for number in range(10)]
    assert rest == "Refused: 2 more. All: --report FILE."


def test_two_onnxruntimes_are_an_error() -> None:
    (check,) = check_conflicts({"onnxruntime": ["onnxruntime-gpu", "onnxruntime"], "faiss": ["faiss-cpu"]})
    assert check.verdict == "error"
    assert "onnxruntime and onnxruntime-gpu overwrite each other" in check.detail


def test_this_installation_is_sound(local: Program, tmp_path: Path) -> None:
    del local.environment["KITH_RUNTIME"]
    checks = json.loads(local("doctor", "--json"))
    assert {check["verdict"] for check in checks} == {"ok"}
    assert {"detector.onnx", "recognizer.onnx"} <= {check["what"] for check in checks}
    assert any("nodes on OpenVINO" in check["detail"] for check in checks)
    assert any("nodes on CPUExecutionProvider" in c.detail for c in diagnose(load_settings(runtime="onnxruntime")))
    assert any(c.what == "pack" and c.verdict == "error" for c in diagnose(load_settings(pack=tmp_path)))


def test_openvino_suffices_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    checks = diagnose(load_settings(runtime=None))
    assert [c.what for c in checks if c.verdict == "error"] == []
    assert [c.what for c in checks if c.verdict == "warning"] == ["onnxruntime"]
    assert any("nodes on OpenVINO" in c.detail for c in checks)
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert [c.what for c in diagnose(load_settings(runtime=None)) if c.verdict == "error"] == ["onnxruntime"]
