"""The script that redraws the papers' figures: what it draws matches the papers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.training.runs import tiny_run, write_people
from tools import paper_figures as figures
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
