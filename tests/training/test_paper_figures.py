"""The script that redraws the papers' figures: what it draws matches the papers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.training.runs import tiny_run, write_people
from tools import paper_figures as figures
from tools.paper_figures import (
    PEOPLE,
    Toy,
    arcs_rad,
    probability,
)
from training.bounds import fixed_scale
from training.run.train import train_recognizer


@pytest.mark.long
@pytest.mark.usefixtures("pictures")
def test_every_figure_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_recognizer(tiny_run(write_people(tmp_path / "people"), tmp_path / "run", epochs=1))
    output = tmp_path / "figures"
    monkeypatch.setattr("sys.argv", ["figures", str(output), str(tmp_path / "run")])
    figures.main()
    formulas = ("scales", "margins", "target-logits", "boundaries", "cosine-boundaries", "bounds")
    drawn = {path.stem for path in output.iterdir()}
    assert drawn == {*formulas, "plane", "bias", "arcs", "run-angles-run"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in output.iterdir())


def test_probability_is_the_papers() -> None:
    theta = np.array([0.3, 0.8, 1.4])
    for s, m in ((13.1, 0.0), (30.0, 0.4)):
        e = np.exp(s * np.cos(theta + m))
        np.testing.assert_allclose(probability(theta, s, m), e / (e + 10_574), rtol=1e-9)
    # A small s never reaches 1, and a large s accepts angles near 90 degrees (AdaCos, section 3.1).
    assert probability(np.array([0.001]), 5.0, 0.0)[0] < 0.05
    assert probability(np.array([math.radians(75)]), 64.0, 0.0)[0] > 0.95
    assert probability(np.array([math.pi / 4]), fixed_scale(10_575), 0.0)[0] == pytest.approx(0.5)


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
    longer = regions["softmax, ||W1|| = 1.5 ||W2||"]
    assert longer[140, 120] == 2 and longer[150, 140] == 1  # (0.20, 0.40) and (0.40, 0.50)
    # A-softmax's margin vanishes where both angles are small, and is widest near right angles.
    a_softmax = regions["A-softmax, m = 4"]
    assert (a_softmax[100] == 0).mean() > 0.8
    assert (np.diag(a_softmax)[1:-1] == 0).all()


def test_arcs_cover_the_embeddings() -> None:
    middles = 2 * math.pi * np.arange(PEOPLE) / PEOPLE
    directions = (middles[:, None] + 0.1 * np.array([-1, 0, 1])).ravel()
    x_N2 = np.stack([np.cos(directions), np.sin(directions)], 1)
    ends = arcs_rad(Toy(x_N2, np.repeat(np.arange(PEOPLE), 3), np.eye(PEOPLE)[:, :2]))
    np.testing.assert_allclose(np.diff(ends, axis=1), 0.19, atol=1e-9)  # quantiles of three values
