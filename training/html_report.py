"""One self-contained HTML file about a run or a pack: figures, curves, and the pairs it gets most wrong."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from models.detection import DEFAULT_SCORE
from models.pack import ModelPack
from models.recognition import Recogniser
from models.runtime import OnnxNetwork
from training import plots
from training.benchmarks import Embed, Judgement, LfwCrops, embed_lfw, judge_embeddings, load_lfw_crops
from training.data.spread import spread_rows
from training.evaluate import Embeddings, read_open_set, read_pairs
from training.metrics import best_threshold, cmc, fnir_curve, roc, search

WORST_PAIRS: Final = 8
SAMPLE_CROPS: Final = 32
CMC_RANKS: Final = tuple(range(1, 51))

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.45 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }}
h2 {{ margin-top: 2.5rem; border-bottom: 1px solid #ddd }}
table {{ border-collapse: collapse }}
th, td {{ text-align: left; padding: .25rem 1.5rem .25rem 0; border-bottom: 1px solid #eee }}
.side {{ display: flex; flex-wrap: wrap; gap: 1rem }}
.side > img {{ width: calc(50% - .5rem); min-width: 320px; height: auto }}
.wide {{ max-width: 100% }}
figure {{ margin: 0; width: 250px; font-size: .8rem; overflow-wrap: anywhere }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


@dataclass(frozen=True, eq=False)
class LfwEvidence:
    """Crops, what a network makes of them, and how that is judged."""

    crops: LfwCrops
    embeddings: Embeddings
    judgement: Judgement


def gather(embed: Embed, crops: LfwCrops, flip: bool = False) -> LfwEvidence:
    """Embed and judge the crops of all parts that ``crops`` has."""
    embeddings = embed_lfw(embed, crops, flip)
    return LfwEvidence(crops, embeddings, judge_embeddings(embeddings, crops.root, crops.parts))


def write_pack_report(
    path: Path, pack: ModelPack, lfw: Path, cache_dir: Path, about: Sequence[tuple[str, str]] = ()
) -> Judgement:
    """Measure a pack on LFW (``lfw`` holds images/ and the lists) through its own detector and write its report;
    ``about``: further lines of the headline table.

    Raises:
        ConfigError: LFW is incomplete.
        PackError: the pack cannot be run.
    """
    crops = load_lfw_crops(
        lfw, pack.detection, cache_dir, min_score=DEFAULT_SCORE, alignment=pack.recognition.alignment
    )
    recogniser = Recogniser(OnnxNetwork(pack.recognition.path), pack.recognition)
    evidence = gather(recogniser.embed, crops)
    write_report(path, f"{pack.display_name} ({pack.model_id})", about, lfw=evidence)
    return evidence.judgement


def write_report(
    path: Path,
    title: str,
    about: Sequence[tuple[str, str]] = (),
    losses: Path | None = None,
    lfw: LfwEvidence | None = None,
    samples_NHWC: NDArray[np.uint8] | None = None,
) -> None:
    """Write the report; sections without evidence are left out, and the file appears only when complete.

    Args:
        path: of the HTML file.
        title: its heading.
        about: measures and values to put before LFW's.
        losses: a run's losses.csv.
        lfw: from :func:`gather`.
        samples_NHWC: (n, 112, 112, 3) uint8 RGB crops, as they were trained on.

    Raises:
        ConfigError: ``losses`` or one of LFW's lists cannot be read.
    """
    headline = [(name, value, "") for name, value in about] + (headline_rows(lfw.judgement) if lfw else [])
    sections = [_table(("Measure", "Value", "95 % interval over people"), headline)] if headline else []
    if losses is not None:
        sections.append("<h2>Training</h2>" + _plot(plots.loss_curves(losses), "Loss and schedule by step", "wide"))
    if samples_NHWC is not None:
        sections.append(_samples("Crops it learned from", samples_NHWC))
    if lfw is not None:
        if lfw.judgement.view2 is not None:
            sections.append(_verification(lfw))
        if lfw.judgement.open_set is not None:
            sections.append(_identification(lfw))
        sections.append(_samples("LFW as the detector aligns it", lfw.crops.crops_NHWC))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(PAGE.format(title=escape(title), body="\n".join(sections)), encoding="utf-8")
    partial.replace(path)


def headline_rows(judgement: Judgement) -> list[tuple[str, str, str]]:
    """Measure, value and 95 % interval (or nothing) of all that was judged."""
    rows = []
    if view1 := judgement.view1:
        rows.append(("LFW View 1 accuracy, threshold of its training pairs", f"{view1.accuracy:.2%}", ""))
    if view2 := judgement.view2:
        ends = {name: _ends(*interval) for name, interval in view2.intervals.items()}
        rows += [
            ("LFW View 2 accuracy", f"{view2.accuracy.mean:.2%} ± {view2.accuracy.std:.2%}", ends["accuracy"]),
            ("LFW View 2 TAR at FAR 0.1 %", f"{view2.tar_at_far_1e3:.2%}", ends["tar_at_far_1e3"]),
            ("LFW View 2 TAR at FAR 1 %", f"{view2.tar_at_far_1e2:.2%}", ""),
            ("LFW View 2 EER", f"{view2.eer:.2%}", ends["eer"]),
            ("LFW View 2 area under the ROC", f"{view2.auc:.4f}", ""),
            ("LFW View 2 photos without a face", f"{view2.photos_without_face}", ""),
        ]
    if wide := judgement.open_set:
        rows.append(("LFW open set rank-1", f"{wide.rank1:.2%}", _ends(*wide.rank1_interval)))
        for rate, fnir in wide.fnir.items():
            value = f"{fnir:.2%} (threshold {wide.thresholds[rate]:.3f})"
            rows.append((f"LFW open set FNIR at FPIR {rate:.1%}", value, _ends(*wide.fnir_intervals[rate])))
        rate, fnir = min(wide.fnir_without_doubtful.items())
        rows.append((f"LFW open set FNIR at FPIR {rate:.1%}, without five doubtful strangers", f"{fnir:.2%}", ""))
    angles = judgement.angles
    rows += [
        ("LFW Intra: mean angle to the own centre", f"{angles.intra:.2f}°", ""),
        ("LFW Inter: mean angle to the nearest other centre", f"{angles.inter:.2f}°", ""),
    ]
    return rows


def _ends(low: float, high: float) -> str:
    return f"{low:.2%} to {high:.2%}"


def _verification(lfw: LfwEvidence) -> str:
    pairs = read_pairs(lfw.crops.root / "pairs.txt")
    similarities = lfw.embeddings.similarities(pairs)
    view1 = lfw.judgement.view1
    threshold = view1.threshold if view1 else best_threshold(similarities, pairs.same)
    curve = roc(similarities, pairs.same)
    figures = [
        _plot(
            plots.similarity_histograms(
                similarities, pairs.same, threshold, "chosen on View 1" if view1 else "the best in hindsight"
            ),
            "Histograms of mated and non-mated similarities",
        ),
        _plot(plots.roc_curve(curve), "ROC curve"),
        _plot(plots.det_curve(curve), "DET curve"),
    ]
    rows_of = {file: i for i, file in enumerate(lfw.crops.files)}
    first, second = (np.array([rows_of[file] for file in files]) for files in (pairs.first, pairs.second))
    seen = lfw.crops.found[first] & lfw.crops.found[second]
    order = np.argsort(similarities)

    def sheet(chosen: NDArray[np.intp]) -> str:
        return _side_by_side(
            [_pair(lfw.crops, int(first[i]), int(second[i]), float(similarities[i])) for i in chosen[:WORST_PAIRS]]
        )

    return "\n".join(
        [
            "<h2>Verification, LFW View 2</h2>",
            _side_by_side(figures),
            "<h2>Same people, least alike</h2>",
            sheet(order[(pairs.same & seen)[order]]),
            "<h2>Different people, most alike</h2>",
            sheet(order[(~pairs.same & seen)[order]][::-1]),
        ]
    )


def _identification(lfw: LfwEvidence) -> str:
    protocol = read_open_set(lfw.crops.root / "openset_protocol.json")
    wide = lfw.embeddings.vectors.astype(np.float64)
    gallery, mated, strangers = (
        wide[lfw.embeddings.rows(files)] for files in (protocol.gallery, protocol.mated, protocol.strangers)
    )
    mates = protocol.mates()
    figures = [
        _plot(plots.fnir_against_fpir(fnir_curve(*search(gallery, mated, mates, strangers))), "FNIR against FPIR"),
        _plot(plots.cmc_curve(cmc(mated @ gallery.T, mates, CMC_RANKS)), "CMC curve"),
    ]
    heading = f"{len(gallery):,} enrolled, {len(mated):,} mated probes, {len(strangers):,} strangers"
    return f"<h2>Identification, LFW open set</h2><p>{heading}.</p>{_side_by_side(figures)}"


def _samples(heading: str, crops_NHWC: NDArray[np.uint8]) -> str:
    """A sheet of crops, evenly from the first to the last."""
    chosen = crops_NHWC[spread_rows(len(crops_NHWC), SAMPLE_CROPS)]
    lines = [np.concatenate(list(chosen[i : i + 8]), 1) for i in range(0, len(chosen) - len(chosen) % 8, 8)]
    sheet = np.concatenate(lines or [np.concatenate(list(chosen), 1)])
    return f"<h2>{escape(heading)}</h2>{_picture(sheet, heading, 'wide')}"


def _pair(crops: LfwCrops, first: int, second: int, similarity: float) -> str:
    names = [crops.files[row].rsplit("/", 1)[-1] for row in (first, second)]
    picture = _picture(np.concatenate([crops.crops_NHWC[first], crops.crops_NHWC[second]], 1), " and ".join(names))
    return f"<figure>{picture}<figcaption>{similarity:.3f}: {escape(', '.join(names))}</figcaption></figure>"


def _picture(image: NDArray[np.uint8], alt: str, kind: str = "") -> str:
    encoded, data = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 88])
    assert encoded  # noqa: S101  (a JPEG of a uint8 array in memory cannot fail)
    return _img(data.tobytes(), "jpeg", alt, kind)


def _plot(figure: plots.Figure, alt: str, kind: str = "") -> str:
    return _img(plots.png(figure), "png", alt, kind)


def _img(data: bytes, subtype: str, alt: str, kind: str) -> str:
    source = f"data:image/{subtype};base64,{base64.b64encode(data).decode()}"
    return f'<img class="{kind}" alt="{escape(alt)}" src="{source}">'


def _side_by_side(items: Sequence[str]) -> str:
    return f'<div class="side">{"".join(items)}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(head, "th") + "".join(line(row, "td") for row in rows) + "</table>"
