"""Self-contained HTML report of a run or a pack: figures, curves and worst pairs."""

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

from models.pack.manifest import ModelPack
from models.risk.search_rates import search_gallery
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import standard_alignment
from models.vision.detection import DEFAULT_MIN_SCORE
from models.vision.recognition import Recognizer
from models.vision.specs import DetectionSpec
from training.config import ConfigError, RunConfig
from training.data.identities import load_identities
from training.data.split import split_identities
from training.data.subsampling import evenly_spaced_rows
from training.evaluation import plots
from training.evaluation.embedding import Embed, Embeddings, cached_embedder, load_run, torch_embedder
from training.evaluation.lfw import (
    PARTS,
    VIEW1,
    LfwCrops,
    LfwResult,
    embed_lfw,
    evaluate_lfw_embeddings,
    load_lfw_crops,
    read_open_set,
    read_pairs,
)
from training.evaluation.metrics import best_threshold, cmc, fnir_curve, roc
from training.losses import build_head
from training.optimization.run_folder import CHECKPOINT, LOSSES, check_classes, load_checkpoint
from training.optimization.sharded import read_class_weights
from training.run.compare import training_angle_rows, training_angles
from training.run.people import HeldOut, MeasuredPeople, people_figures, worst_pairs

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
class LfwResults:
    """Crops of LFW, their embeddings and the results."""

    crops: LfwCrops
    embeddings: Embeddings
    judgment: LfwResult


def collect_lfw_results(embed: Embed, crops: LfwCrops, flip: bool = False) -> LfwResults:
    """Embed and evaluate the crops for all parts in ``crops``."""
    embeddings = embed_lfw(embed, crops, flip)
    return LfwResults(crops, embeddings, evaluate_lfw_embeddings(embeddings, crops.root, crops.parts))


def write_pack_report(
    path: Path, pack: ModelPack, lfw: Path, cache_dir: Path, people: Sequence[MeasuredPeople] = ()
) -> LfwResult:
    """Measure a pack on LFW through its own detector and write the report. ``lfw``: folder with images/ and the lists.
    ``people``: further results.
    Raises ConfigError: LFW is incomplete. PackError: the pack cannot be loaded."""
    crops = load_lfw_crops(
        lfw, pack.detection, cache_dir, min_score=DEFAULT_MIN_SCORE, alignment=pack.recognition.alignment
    )
    recognizer = Recognizer(OnnxNetwork(pack.recognition.path), pack.recognition)
    evidence = collect_lfw_results(recognizer.embed, crops)
    write_report(path, f"{pack.display_name} ({pack.model_id})", lfw=evidence, people=people)
    return evidence.judgment


def report_run(
    run: Path,
    data: Path | None,
    detection: DetectionSpec,
    report: Path | None,
    flip: bool = False,
    view1: bool = False,
    people: Sequence[MeasuredPeople] = (),
) -> list[tuple[str, str]]:
    """Evaluate a run on the people and photos that it was not trained on, and on LFW (``data``/lfw, aligned by this
    detector); return the figures. With ``report``, also write them as HTML, with curves, worst pairs, sample crops and
    the figures of further ``people``."""
    config, backbone = load_run(run)
    embed, vectors = cached_embedder(torch_embedder(backbone), run / CHECKPOINT, run.parent / "cache")
    evidence = None
    if data is not None:
        crops = load_lfw_crops(
            data / "lfw",
            detection,
            run.parent / "cache",
            VIEW1 if view1 else PARTS,
            alignment=standard_alignment(config.data.crop_px),
        )
        evidence = collect_lfw_results(embed, crops, flip)
    split = split_identities(
        load_identities(config.data, config.output.parent / "cache"), config.data, config.loop.seed
    )
    trained_on, held_out = split.train, HeldOut(split).measure(embed, intervals=True, flip=flip)
    head = build_head(config.head, config.backbone.embedding_dim, trained_on.num_classes)
    state = load_checkpoint(run / CHECKPOINT)
    check_classes(state, trained_on, run / CHECKPOINT)
    shards = state.get("shards")
    head.load_full_state({**state["head"], **({"weight": read_class_weights(run, shards)} if shards else {})})
    if data is None and not held_out and not people:
        raise ConfigError(f"{run} holds out nothing. Name a benchmark, such as --people or --data")
    own = training_angles(embed, trained_on, head.class_weights())
    vectors.save()
    about = [("Head", _describe_head(config)), *training_angle_rows(own)]
    if report is not None:
        title, crops_NHWC = f"Run {config.name}", trained_on.crops_NHWC
        write_report(report, title, about, run / LOSSES, evidence, crops_NHWC, [*held_out, *people])
    lfw = [] if evidence is None else [(name, value) for name, value, _ in headline_rows(evidence.judgment)]
    return [*about, *people_figures(held_out), *lfw]


def _describe_head(config: RunConfig) -> str:
    options = ", ".join(f"{k}={v}" for k, v in config.head.options.items())
    terms = "".join(f" + {t.weight:g} {t.name}" for t in config.terms)
    return f"{config.head.name}{f' ({options})' if options else ''}{terms}"


def write_report(
    path: Path,
    title: str,
    about: Sequence[tuple[str, str]] = (),
    losses: Path | None = None,
    lfw: LfwResults | None = None,
    samples_NHWC: NDArray[np.uint8] | None = None,
    people: Sequence[MeasuredPeople] = (),
) -> None:
    """Write the report atomically, without sections that have no data. Raises ConfigError: ``losses`` or a list of LFW
    cannot be read.

    Args:
        about: measures and values to list before those of LFW.
        losses: losses.csv of a run.
        lfw: result of `collect_lfw_results`.
        samples_NHWC: (n, s, s, 3) uint8 RGB training crops.
        people: results on sets of people.
    """
    headline = [(name, value, "") for name, value in about] + [row for one in people for row in one.rows()]
    headline += headline_rows(lfw.judgment) if lfw else []
    sections = [_table(("Measure", "Value", "95 % interval over people"), headline)] if headline else []
    if losses is not None:
        sections.append("<h2>Training</h2>" + _plot(plots.loss_curves(losses), "Loss and schedule by step", "wide"))
    if samples_NHWC is not None:
        sections.append(_samples("Training crops", samples_NHWC))
    if (pairs := worst_pairs(people)) is not None:
        sections.append("<h2>Worst pairs</h2>" + _plot(pairs, "Worst pairs of each set", "wide"))
    if lfw is not None:
        if lfw.judgment.view2 is not None:
            sections.append(_verification(lfw))
        if lfw.judgment.open_set is not None:
            sections.append(_identification(lfw))
        sections.append(_samples("Aligned LFW crops", lfw.crops.crops_NHWC))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(PAGE.format(title=escape(title), body="\n".join(sections)), encoding="utf-8")
    partial.replace(path)


def headline_rows(judgment: LfwResult) -> list[tuple[str, str, str]]:
    """Return measure, value and 95 % interval (or an empty text) of all results."""
    rows = []
    if view1 := judgment.view1:
        rows.append(("LFW View 1 accuracy, threshold of its training pairs", f"{view1.accuracy:.2%}", ""))
    if view2 := judgment.view2:
        intervals = {name: _format_interval(*interval) for name, interval in view2.intervals.items()}
        rows += [
            ("LFW View 2 accuracy", f"{view2.accuracy.mean:.2%} ± {view2.accuracy.std:.2%}", intervals["accuracy"]),
            ("LFW View 2 TAR at FAR 0.1 %", f"{view2.tar_at_far_1e3:.2%}", intervals["tar_at_far_1e3"]),
            ("LFW View 2 TAR at FAR 1 %", f"{view2.tar_at_far_1e2:.2%}", ""),
            ("LFW View 2 EER", f"{view2.eer:.2%}", intervals["eer"]),
            ("LFW View 2 area under the ROC", f"{view2.auc:.4f}", ""),
            ("LFW View 2 photos without a face", f"{view2.photos_without_face}", ""),
        ]
    if open_set := judgment.open_set:
        rows.append(("LFW open set rank-1", f"{open_set.rank1:.2%}", _format_interval(*open_set.rank1_interval)))
        for rate, fnir in open_set.fnir.items():
            value = f"{fnir:.2%} (threshold {open_set.thresholds[rate]:.3f})"
            rows.append(
                (f"LFW open set FNIR at FPIR {rate:.1%}", value, _format_interval(*open_set.fnir_intervals[rate]))
            )
        rate, fnir = min(open_set.fnir_without_doubtful.items())
        rows.append((f"LFW open set FNIR at FPIR {rate:.1%}, without five doubtful strangers", f"{fnir:.2%}", ""))
    angles = judgment.angles
    rows += [
        ("LFW Intra: mean angle to the class center", f"{angles.intra:.2f}°", ""),
        ("LFW Inter: mean angle to the nearest other center", f"{angles.inter:.2f}°", ""),
    ]
    return rows


def _format_interval(low: float, high: float) -> str:
    return f"{low:.2%} to {high:.2%}"


def _verification(lfw: LfwResults) -> str:
    pairs = read_pairs(lfw.crops.root / "pairs.txt")
    similarities = lfw.embeddings.similarities(pairs)
    view1 = lfw.judgment.view1
    threshold = view1.threshold if view1 else best_threshold(similarities, pairs.same)
    curve = roc(similarities, pairs.same)
    figures = [
        _plot(
            plots.similarity_histograms(
                similarities, pairs.same, threshold, "chosen on View 1" if view1 else "best on the same pairs"
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
            "<h2>Least similar pairs of the same person</h2>",
            sheet(order[(pairs.same & seen)[order]]),
            "<h2>Most similar pairs of different people</h2>",
            sheet(order[(~pairs.same & seen)[order]][::-1]),
        ]
    )


def _identification(lfw: LfwResults) -> str:
    protocol = read_open_set(lfw.crops.root / "openset_protocol.json")
    vectors = lfw.embeddings.vectors.astype(np.float64)
    gallery, mated, strangers = (
        vectors[lfw.embeddings.rows(files)] for files in (protocol.gallery, protocol.mated, protocol.strangers)
    )
    mates = protocol.mates()
    figures = [
        _plot(
            plots.fnir_against_fpir(fnir_curve(*search_gallery(gallery, mated, mates, strangers))), "FNIR against FPIR"
        ),
        _plot(plots.cmc_curve(cmc(mated @ gallery.T, mates, CMC_RANKS)), "CMC curve"),
    ]
    heading = f"{len(gallery):,} enrolled, {len(mated):,} mated probes, {len(strangers):,} strangers"
    return f"<h2>Identification, LFW open set</h2><p>{heading}.</p>{_side_by_side(figures)}"


def _samples(heading: str, crops_NHWC: NDArray[np.uint8]) -> str:
    """Return a sheet of evenly spaced crops."""
    chosen = crops_NHWC[evenly_spaced_rows(len(crops_NHWC), SAMPLE_CROPS)]
    lines = [np.concatenate(list(chosen[i : i + 8]), 1) for i in range(0, len(chosen) - len(chosen) % 8, 8)]
    sheet = np.concatenate(lines or [np.concatenate(list(chosen), 1)])
    return f"<h2>{escape(heading)}</h2>{_picture(sheet, heading, 'wide')}"


def _pair(crops: LfwCrops, first: int, second: int, similarity: float) -> str:
    names = [crops.files[row].rsplit("/", 1)[-1] for row in (first, second)]
    picture = _picture(np.concatenate([crops.crops_NHWC[first], crops.crops_NHWC[second]], 1), " and ".join(names))
    return f"<figure>{picture}<figcaption>{similarity:.3f}: {escape(', '.join(names))}</figcaption></figure>"


def _picture(image: NDArray[np.uint8], alt: str, kind: str = "") -> str:
    encoded, data = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 88])
    assert encoded  # noqa: S101 - encoding a uint8 array cannot fail
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
