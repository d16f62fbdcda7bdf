"""The accuracy table contains the model card's figures and marks each goal as met or missed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.accuracy import DIFFERENCE, GOALS, THROUGH_YUNET, Column, main, markdown
from training.export.model_card import MEASURES

ALARMS = {
    "upside_down": 50,
    "upside_down_photos": 100,
    "noise": 1,
    "noise_pictures": 200,
    "textures": 2,
    "texture_pictures": 200,
}
METRICS = {
    "lfw_central_faces": {"photos": 1000, "found": 0.9995, "median_landmark_error": 0.05},
    "false_alarms": ALARMS,
    "face_sizes_found": {"16": 0.5, "32": 1.0},
}


def cells(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_goals_are_judged_against_the_figures() -> None:
    yunet = {**METRICS, "false_alarms": {**ALARMS, "upside_down": 97, "noise": 0}}
    table = markdown([Column("ours", METRICS, {"Detector": "a.onnx"}), Column("YuNet", yunet, {})])
    assert cells(table, "Detector") == ["a.onnx", "-", ""]
    assert cells(table, "LFW central face found") == ["99.95% of 1000", "99.95% of 1000", ">= 99.9 %: met"]
    assert cells(table, "LFW median landmark error")[-1] == "<= 4 %: missed"
    assert cells(table, "LFW photos upside down with a face reported") == ["50 of 100", "97 of 100", "<= YuNet's: met"]
    assert cells(table, "Pictures of noise with a face reported")[-1] == "<= YuNet's: missed"
    assert cells(table, "Faces found at 640 px, by their longer side")[-1] == ">= 90 % at every size: missed"
    assert cells(table, "WIDER val recall at precision 95 %") == ["-", "-", ">= 90 %: not measured"]


def test_without_yunet_nothing_is_judged_by_it() -> None:
    table = markdown([Column("ours", METRICS, {})])
    assert cells(table, "Textures with a face reported") == ["2 of 200", "<= YuNet's: not measured"]


def test_every_goal_has_a_row() -> None:
    assert set(GOALS) <= set(MEASURES) | {DIFFERENCE, THROUGH_YUNET}


def test_missing_data_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITH_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench.accuracy"])
    with pytest.raises(SystemExit, match=f"not at {tmp_path}: set KITH_DATA"):
        main()
