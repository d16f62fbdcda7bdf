"""Reports hold the measured figures, and pictures show them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from scipy.stats import norm

from tests.training.evaluation.test_benchmarks import mean_colors, write_lists
from training.evaluation import plots
from training.evaluation.embedding import Embeddings
from training.evaluation.lfw import LfwResult, evaluate_lfw_embeddings
from training.evaluation.metrics import fnir_curve, roc
from training.run.report import lfw_figures, write_report

pytestmark = pytest.mark.usefixtures("pictures")


@pytest.fixture
def lfw(tmp_path: Path, rng: np.random.Generator) -> LfwResult:
    """Noise in a color of each person's own, judged by its color; no face was found in the fifth photo."""
    files = write_lists(tmp_path / "lfw", rng)
    people = [file.split("/")[0] for file in files]
    colors = {person: rng.integers(0, 200, 3) for person in people}
    crops = np.stack([colors[p] + rng.integers(0, 56, (112, 112, 3)) + rng.integers(-60, 60, 3) for p in people])
    crops = np.clip(crops, 0, 255).astype(np.uint8)
    found = np.arange(len(files)) != 4
    crops[4] = 0
    vectors = mean_colors(crops) * found[:, None]
    embeddings = Embeddings(files, vectors.astype(np.float32), found)
    return evaluate_lfw_embeddings(embeddings, tmp_path / "lfw")


def test_a_report_has_every_figure_and_one_picture(lfw: LfwResult, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_report(path, "A <run>", {"Head": "arcface"}, lfw)
    assert {p.name for p in path.parent.iterdir()} == {"report.json", "report.png"}
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(path.read_text())
    assert (document["title"], document["about"], document["people"]) == ("A <run>", {"Head": "arcface"}, [])
    assert document["lfw"] == json.loads(json.dumps(lfw.as_dict()))
    view2 = lfw.view2
    assert view2 is not None
    low, high = view2.intervals["eer"]
    printed = dict(lfw_figures(lfw))
    assert printed["LFW View 2 EER"] == f"{view2.eer:.2%} (95 %: {low:.2%} to {high:.2%})"
    assert len([name for name in printed if "FNIR at FPIR" in name]) == 4


def test_skipped_parts_are_omitted(lfw: LfwResult, tmp_path: Path) -> None:
    only_view1 = evaluate_lfw_embeddings(lfw.embeddings, lfw.root, ["view1"])
    write_report(tmp_path / "r.json", "r", lfw=only_view1)
    found = json.loads((tmp_path / "r.json").read_text())["lfw"]
    assert found["view1"]["accuracy"] > 0
    assert (found["view2"], found["open_set"]) == (None, None)
    assert not (tmp_path / "r.png").exists()
    assert not any("View 2" in name or "open set" in name for name, _ in lfw_figures(only_view1))


def line(axes: Axes, row: int = 0) -> NDArray[np.float64]:
    """(k, 2) points of a drawn line."""
    drawn = axes.lines[row]
    assert isinstance(drawn, Line2D)
    return np.asarray(drawn.get_xydata(), np.float64)


@pytest.fixture
def pairs(rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    same = rng.random(300) < 0.4
    return rng.normal(np.where(same, 0.4, 0.1), 0.15), same


def test_curves_are_drawn_through_the_rates(pairs: tuple[NDArray[np.float64], NDArray[np.bool_]]) -> None:
    curve = roc(*pairs)
    hits, alarms = np.where(np.arange(300) % 3 == 0, -np.inf, pairs[0]), pairs[0][~pairs[1]]
    figure = plots.curves(*pairs, 0.25, "chosen by hand", hits, alarms)
    _, roc_axes, det_axes, open_set = figure.axes
    points = {(f, t) for f, t in zip(curve.fmr, curve.tar, strict=True) if f > 0}
    assert {(x, y) for x, y in line(roc_axes)} == points
    inside = [(f, n) for f, n in zip(curve.fmr, curve.fnmr, strict=True) if 0 < f < 1 and 0 < n < 1]
    assert norm.cdf(line(det_axes)) == pytest.approx(np.array(inside))
    wide = fnir_curve(hits, alarms)
    drawn = {(x, y) for x, y in line(open_set)}
    assert drawn == {(f, n) for f, n in zip(wide.fmr, wide.fnmr, strict=True) if f > 0}
    same = np.arange(40) < 20
    for perfect in (True, False):  # networks whose curves have no point inside
        scores = np.where(same == perfect, 0.9, 0.1)
        figure = plots.curves(scores, same, 0.5, "chosen by hand", scores[same], scores[~same])
        assert plots.png(figure, dpi=40).startswith(b"\x89PNG")


def test_loss_curves_have_one_panel_per_column(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    lines = [f"{step},{10 / step},{0.1 - step / 1000},64,{min(1, step / 20)}" for step in range(1, 101)]
    path.write_text("\n".join(["step,loss,learning_rate,scale,margin_share", *lines]) + "\n")
    loss, *others = (axes for axes in plots.loss_curves(path).axes if axes.get_visible())
    assert [axes.get_ylabel() for axes in (loss, *others)] == ["loss", "margin share", "scale", "learning rate"]
    assert line(loss)[:, 1] == pytest.approx([10 / step for step in range(1, 101)])
    assert line(loss, row=1)[0] == pytest.approx([1.5, 7.5])  # the mean of two steps
    assert line(others[-1])[-1].tolist() == [100, 0.0]
    # The rise of the margin is shaded where it raises the loss.
    assert [len(axes.patches) for axes in (loss, others[0])] == [1, 0]
