"""Reports are self-contained and show the measured figures."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import norm

from tests.training.evaluation.test_benchmarks import mean_colors, write_lists
from training.config import ConfigError
from training.evaluation import plots
from training.evaluation.embedding import Embeddings
from training.evaluation.lfw import PARTS, LfwCrops, evaluate_lfw_embeddings, read_pairs
from training.evaluation.metrics import Roc, fnir_curve, roc
from training.run import html_report
from training.run.html_report import LfwResults, headline_rows, write_report


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[tuple[str, Image.Image]] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self.references += [str(values[k]) for k in ("src", "href", "srcset", "data") if k in values]
        if tag == "img":
            data = base64.b64decode(str(values["src"]).split("base64,")[1])
            self.images.append((str(values["alt"]), Image.open(io.BytesIO(data))))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def lfw(tmp_path: Path, rng: np.random.Generator) -> LfwResults:
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
    return LfwResults(
        LfwCrops(tmp_path / "lfw", PARTS, files, crops, found),
        embeddings,
        evaluate_lfw_embeddings(embeddings, tmp_path / "lfw"),
    )


@pytest.fixture
def losses(tmp_path: Path) -> Path:
    path = tmp_path / "losses.csv"
    lines = [f"{step},{10 / step},{0.1 - step / 1000},{64.0}" for step in range(1, 101)]
    path.write_text("\n".join(["step,loss,learning_rate,scale", *lines]) + "\n")
    return path


def test_a_report_is_one_file_that_needs_nothing_else(lfw: LfwResults, losses: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_report(path, "A <run> & more", [("Head", "<script>")], losses, lfw, lfw.crops.crops_NHWC[:11])
    page = Page(path.read_text(encoding="utf-8"))
    assert page.references
    assert all(reference.startswith("data:image/") for reference in page.references)
    assert "url(" not in path.read_text()
    assert page.tags.isdisjoint({"script", "link", "iframe", "run"})
    assert "A <run> & more" in page.text
    assert "<script>" in page.text
    for _, image in page.images:
        image.load()
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_report_states_every_figure(lfw: LfwResults, tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", "r", lfw=lfw)
    page = Page((tmp_path / "r.html").read_text())
    rows = headline_rows(lfw.judgment)
    for row in rows:
        assert all(cell in page.text for cell in row)
    table = {name: (value, interval) for name, value, interval in rows}
    view2 = lfw.judgment.view2
    assert view2 is not None
    low, high = view2.intervals["eer"]
    assert table["LFW View 2 EER"] == (f"{view2.eer:.2%}", f"{low:.2%} to {high:.2%}")
    assert len([name for name in table if "FNIR at FPIR" in name]) == 4
    alts = [alt for alt, _ in page.images]
    assert {"ROC curve", "DET curve", "FNIR against FPIR", "CMC curve"} <= set(alts)


def test_the_worst_pairs_are_shown_worst_first(lfw: LfwResults, tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", "r", lfw=lfw)
    shown = [(alt, image) for alt, image in Page((tmp_path / "r.html").read_text()).images if image.size == (224, 112)]
    pairs = read_pairs(lfw.crops.root / "pairs.txt")
    crop = dict(zip(lfw.crops.files, lfw.crops.crops_NHWC, strict=True))
    vector = dict(zip(lfw.crops.files, lfw.embeddings.vectors, strict=True))
    scored = [
        (float(vector[a] @ vector[b]), a, b, same)
        for a, b, same in zip(pairs.first, pairs.second, pairs.same, strict=True)
        if vector[a].any() and vector[b].any()  # a photo without a face shows nothing
    ]
    mated = sorted((s, a, b) for s, a, b, same in scored if same)[:8]
    non_mated = sorted(((s, a, b) for s, a, b, same in scored if not same), reverse=True)[:8]
    expected = [*mated, *non_mated]
    assert len(shown) == len(expected)
    text = (tmp_path / "r.html").read_text()
    for (alt, image), (similarity, a, b) in zip(shown, expected, strict=True):
        names = [Path(file).name for file in (a, b)]
        if sum(round(s, 6) == round(similarity, 6) for s, *_ in scored) == 1:
            assert alt == " and ".join(names)
            assert f"{similarity:.3f}: {', '.join(names)}" in text
            side_by_side = np.concatenate([crop[a], crop[b]], 1)
            assert np.asarray(image).mean((0, 1)) == pytest.approx(side_by_side.mean((0, 1)), abs=4)


def test_a_failed_report_keeps_the_old_file(lfw: LfwResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_report(path, "old", [("Head", "arcface")])
    with pytest.raises(ConfigError, match=r"nowhere\.csv does not exist"):
        write_report(path, "new", losses=tmp_path / "nowhere.csv")
    monkeypatch.setattr(html_report, "PAGE", "{title} \ud800 {body}")  # cannot be written as UTF-8
    with pytest.raises(UnicodeEncodeError):
        write_report(path, "new")
    assert "arcface" in path.read_text()


def test_skipped_parts_are_omitted(lfw: LfwResults, tmp_path: Path) -> None:
    only_view1 = evaluate_lfw_embeddings(lfw.embeddings, lfw.crops.root, ["view1"])
    write_report(tmp_path / "r.html", "r", lfw=replace(lfw, judgment=only_view1))
    page = Page((tmp_path / "r.html").read_text())
    assert "View 1 accuracy" in page.text
    assert "View 2" not in page.text
    assert "open set" not in page.text
    assert len(page.images) == 1


def line(figure: plots.Figure, panel: int = 0, row: int = 0) -> NDArray[np.float64]:
    """(k, 2) points of a drawn line."""
    drawn = figure.axes[panel].lines[row]
    assert isinstance(drawn, Line2D)
    return np.asarray(drawn.get_xydata(), np.float64)


@pytest.fixture
def pairs(rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    same = rng.random(300) < 0.4
    return rng.normal(np.where(same, 0.4, 0.1), 0.15), same


def test_curves_are_drawn_through_the_rates(pairs: tuple[NDArray[np.float64], NDArray[np.bool_]]) -> None:
    curve = roc(*pairs)
    points = {(f, t) for f, t in zip(curve.fmr, curve.tar, strict=True) if f > 0}
    assert {(x, y) for x, y in line(plots.roc_curve(curve))} == points
    inside = [(f, n) for f, n in zip(curve.fmr, curve.fnmr, strict=True) if 0 < f < 1 and 0 < n < 1]
    assert norm.cdf(line(plots.det_curve(curve))) == pytest.approx(np.array(inside))
    wide = fnir_curve(np.where(np.arange(300) % 3 == 0, -np.inf, pairs[0]), pairs[0][~pairs[1]])
    drawn = {(x, y) for x, y in line(plots.fnir_against_fpir(wide))}
    assert drawn == {(f, n) for f, n in zip(wide.fmr, wide.fnmr, strict=True) if f > 0}
    assert line(plots.cmc_curve(np.array([0.5, 0.7, 0.9]))).tolist() == [[1, 0.5], [2, 0.7], [3, 0.9]]


def test_histograms_are_densities_of_both_kinds(pairs: tuple[NDArray[np.float64], NDArray[np.bool_]]) -> None:
    figure = plots.similarity_histograms(*pairs, 0.25, "chosen by hand")
    patches = figure.axes[0].patches
    assert len(patches) == 2
    for patch in patches:
        xy = patch.get_path().vertices
        x, y = np.asarray(xy).T
        area = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
        assert area == pytest.approx(1)
    assert line(figure)[:, 0].tolist() == [0.25, 0.25]
    legend = figure.axes[0].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [
        f"non-mated ({(~pairs[1]).sum()})",
        f"mated ({pairs[1].sum()})",
        "threshold 0.250, chosen by hand",
    ]


@pytest.mark.parametrize("perfect", [True, False])
def test_extreme_networks_can_be_drawn(perfect: bool) -> None:
    same = np.arange(40) < 20
    similarities = np.where(same == perfect, 0.9, 0.1)
    curve: Roc = roc(similarities, same)
    wide: Roc = fnir_curve(similarities[same], similarities[~same])
    for figure in (plots.roc_curve(curve), plots.det_curve(curve), plots.fnir_against_fpir(wide)):
        assert plots.png(figure, dpi=40).startswith(b"\x89PNG")


def test_loss_curves_have_one_panel_per_column(losses: Path) -> None:
    figure = plots.loss_curves(losses)
    assert [axes.get_ylabel() for axes in figure.axes if axes.get_visible()] == ["loss", "scale", "learning rate"]
    assert line(figure)[:, 1] == pytest.approx([10 / step for step in range(1, 101)])
    mean = line(figure, row=1)
    assert len(mean) == 99
    assert mean[0] == pytest.approx([1.5, 7.5])
    assert line(figure, panel=2)[-1].tolist() == [100, 0.0]
    assert not figure.axes[0].patches  # no margin grows


def test_the_margin_is_beside_the_loss_that_it_raises(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    lines = [f"{step},{10 + min(step, 20)},64.0,{min(1.0, step / 20)}" for step in range(1, 101)]
    path.write_text("\n".join(["step,loss,scale,margin_share", *lines]) + "\n")
    figure = plots.loss_curves(path)
    loss, margin = figure.axes[:2]
    assert [loss.get_ylabel(), margin.get_ylabel()] == ["loss", "margin share"]
    assert loss.get_position().y0 == pytest.approx(margin.get_position().y0)
    assert line(figure, panel=1)[[0, -1]].tolist() == [[1, 0.05], [100, 1.0]]
    (shaded,) = loss.patches
    covered = np.asarray(shaded.get_path().vertices)  # of a unit square
    ends = shaded.get_patch_transform().transform(covered)[:, 0]
    assert (ends.min(), ends.max()) == (1, 19)
    legend = loss.get_legend()
    assert legend is not None
    assert "raises the loss" in legend.get_texts()[0].get_text()
    assert not margin.patches


@pytest.mark.parametrize("text", ["", "step,loss\n", "loss\n1\n", "step\n1\n", "step,loss\n1,much\n", "step,loss\n1\n"])
def test_a_malformed_csv_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "losses.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"losses\.csv"):
        plots.loss_curves(path)
