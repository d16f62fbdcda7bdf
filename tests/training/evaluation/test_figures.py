"""The papers' figures are drawn from the heads and match the papers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.training.runs import tiny_run, write_people
from training.bounds import fixed_scale
from training.config import ConfigError
from training.evaluation import figures
from training.losses import ArcFace, CosFace, NormFace, SphereFace
from training.run.train import train_recognizer


def test_every_figure_is_drawn(tmp_path: Path) -> None:
    train_recognizer(tiny_run(write_people(tmp_path / "people"), tmp_path / "run", epochs=1))
    drawn = figures.draw("all", tmp_path / "figures", 10_575, figures.Measured([tmp_path / "run"]))
    assert {p.stem for p in drawn} == {*figures.FIGURES, "run-angles-run"}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)


def test_probability_is_the_papers() -> None:
    theta = np.array([0.3, 0.8, 1.4])
    for s, m in ((13.1, 0.0), (30.0, 0.4)):
        e = np.exp(s * np.cos(theta + m))
        np.testing.assert_allclose(figures.probability(theta, s, m, 10_575), e / (e + 10_574), rtol=1e-9)
    # A small s never reaches 1, and a large s accepts angles near 90 degrees (AdaCos, section 3.1).
    assert figures.probability(np.array([0.001]), 5.0, 0.0, 10_575)[0] < 0.05
    assert figures.probability(np.array([math.radians(75)]), 64.0, 0.0, 10_575)[0] > 0.95
    assert figures.probability(np.array([math.pi / 4]), fixed_scale(10_575), 0.0, 10_575)[0] == pytest.approx(0.5)


def test_curves_are_those_of_the_heads() -> None:
    theta = np.linspace(0.01, 2.0, 50)
    np.testing.assert_allclose(figures.target_curve(CosFace(2, 2), theta), np.cos(theta) - 0.35)
    np.testing.assert_allclose(figures.target_curve(ArcFace(2, 2), theta), np.cos(theta + 0.5))
    (axes,) = figures.target_logits(100).axes
    assert len(axes.lines) == 7
    assert {line.get_label() for line in axes.lines} >= {"softmax", "ArcFace m = 0.5", "CM2 (0.9, 0.4, 0.15)"}


def test_a_margin_opens_between_the_classes() -> None:
    panels = {axes.get_title(): axes for axes in figures.boundaries(2).axes}
    assert list(panels) == ["softmax", "SphereFace m = 1.35", "ArcFace m = 0.5", "CosFace m = 0.35"]

    angles = np.radians(np.arange(0.5, 90))
    heads = (NormFace(2, 2), SphereFace(2, 2), ArcFace(2, 2), CosFace(2, 2))
    between = [float((figures.acceptance(head, angles) == 0).mean()) for head in heads]
    assert between[0] == 0
    assert 0.2 < between[1] < 0.5 < between[2] < 0.6
    # ArcFace's margin has constant width, 0.5 radians to either side; CosFace's is wider near the center.
    row = figures.acceptance(ArcFace(2, 2), angles)[60]  # the angle to class 2 is 60.5 degrees
    assert np.count_nonzero(row == 0) == pytest.approx(np.degrees(0.5) + 29.5, abs=1.5)
    assert (row[: int(60.5 - np.degrees(0.5))] == 1).all()
    cosface = figures.acceptance(CosFace(2, 2), angles)
    assert (cosface[30] == 0).sum() > (cosface[60] == 0).sum()


def test_cosface_has_a_constant_margin_in_cosine_space() -> None:
    cosines = np.linspace(-0.999, 0.999, 201)
    regions = figures.cosine_regions(cosines)
    nsl, lmcl = regions["NSL (NormFace)"], regions["LMCL (CosFace), m = 0.35"]
    first, second = np.meshgrid(cosines, cosines)
    clear = np.abs(first - second) > 0.01
    assert np.array_equal(nsl[clear], np.where(first > second, 1, 2)[clear])
    clear = np.abs(np.abs(first - second) - 0.35) > 0.01
    assert np.array_equal(lmcl[clear], np.select([first - second > 0.35, second - first > 0.35], [1, 2], 0)[clear])
    # Of softmax, the longer weight of class 1 decides: no margin, and a turned boundary.
    softmax = regions["softmax, ||W1|| = 1.5 ||W2||"]
    assert set(np.unique(softmax)) == {1, 2}
    assert softmax[140, 120] == 2 and softmax[150, 140] == 1  # (0.20, 0.40) and (0.40, 0.50)
    # A-softmax's margin vanishes where both angles are small, and is widest near right angles.
    a_softmax = regions["A-softmax, m = 4"]
    assert (a_softmax[100] == 0).mean() > 0.8
    assert (np.diag(a_softmax)[1:-1] == 0).all()


def test_unknown_figures_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Figures: scales"):
        figures.draw("scale", tmp_path, 100)
    with pytest.raises(ConfigError, match="needs --run"):
        figures.draw("run-angles", tmp_path, 100)
    with pytest.raises(ConfigError, match="needs --run with a run or pack, and --data"):
        figures.draw("pair-angles", tmp_path, 100, figures.Measured([tmp_path]))
    config = tiny_run(write_people(tmp_path / "people"), tmp_path / "run", "cosface", epochs=1, class_sampling=1.0)
    train_recognizer(config)
    with pytest.raises(ConfigError, match="logged no angles"):
        figures.draw("run-angles", tmp_path, 100, figures.Measured([tmp_path / "run"]))
