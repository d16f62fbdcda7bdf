"""The accuracy table contains the model card's figures and marks each goal as met or missed."""

from __future__ import annotations

from bench.accuracy import Column, markdown

METRICS = {"lfw_central_faces": {"photos": 1000, "found": 0.9995, "median_landmark_error": 0.05}}


def cells(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_goals_are_judged_against_the_figures() -> None:
    table = markdown([Column("ours", METRICS, {"Detector": "a.onnx"}), Column("other", METRICS, {})])
    assert cells(table, "Detector") == ["a.onnx", "-", ""]
    assert cells(table, "LFW central face found") == ["99.95% of 1000", "99.95% of 1000", ">= 99.9 %: met"]
    assert cells(table, "LFW median landmark error")[-1] == "<= 4 %: missed"
    assert cells(table, "WIDER val recall at precision 95 %") == ["-", "-", ">= 90 %: not measured"]
