"""Reports of a run or a pack: every figure as JSON, and the curves or the worst pairs in one picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from models.pack.manifest import ModelPack
from models.risk.search_rates import search_gallery
from models.vision.alignment import standard_alignment
from models.vision.specs import DetectionSpec
from training.config import ConfigError, RunConfig
from training.data.identities import load_identities
from training.data.split import split_identities
from training.evaluation import plots
from training.evaluation.embedding import torch_embedder
from training.evaluation.figures import metric_rows
from training.evaluation.lfw import (
    PARTS,
    VIEW1,
    LfwResult,
    evaluate_lfw,
    evaluate_lfw_embeddings,
    load_lfw_crops,
    read_open_set,
    read_pairs,
)
from training.evaluation.metrics import best_threshold
from training.evaluation.pack_evaluation import embed_pack
from training.losses import build_head
from training.optimization.run_folder import CHECKPOINT, check_classes, load_checkpoint, load_run
from training.optimization.sharded import read_class_weights
from training.run.compare import training_angle_rows, training_angles
from training.run.people import HeldOut, MeasuredPeople, people_figures, worst_pairs

PEOPLE_FIGURES: Final = ("people", "photos", "rates", "too_small")
"""Counts and rates of a set of people; rates with an interval as value, low and high."""


def write_pack_report(
    path: Path, pack: ModelPack, lfw: Path, cache: Path, people: Sequence[MeasuredPeople] = ()
) -> None:
    """Measure a pack on LFW through its own detector and write the report, with those of further ``people``. ``lfw``:
    folder with images/ and the lists. Raises ConfigError: LFW is incomplete. PackError: the pack cannot be loaded."""
    evidence = evaluate_lfw_embeddings(embed_pack(pack, lfw, cache, PARTS), lfw)
    write_report(path, f"{pack.display_name} ({pack.model_id})", lfw=evidence, people=people)


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
    detector); return the figures. With ``report``, also write them, with those of further ``people``, as `write_report`
    does."""
    config, backbone = load_run(run)
    embed = torch_embedder(backbone)
    evidence = None
    if data is not None:
        crops = load_lfw_crops(
            data / "lfw",
            detection,
            run.parent / "cache",
            VIEW1 if view1 else PARTS,
            alignment=standard_alignment(config.data.crop_px),
        )
        evidence = evaluate_lfw(embed, crops, flip=flip)
    if config.imported:
        if evidence is None and not people:
            raise ConfigError(f"{run} has imported weights and no photos. Name a benchmark, such as --people or --data")
        if report is not None:
            write_report(report, f"Weights {run.name}", lfw=evidence, people=people)
        return lfw_figures(evidence) if evidence else []
    split = split_identities(
        load_identities(config.data, config.output.parent / "cache"), config.data, config.loop.seed
    )
    trained_on, held_out = split.train, HeldOut(split).measure(embed, intervals=True, flip=flip)
    head = build_head(config.head, config.backbone.embedding_dim, trained_on.num_classes)
    state = load_checkpoint(run / CHECKPOINT)
    check_classes(state, trained_on, run / CHECKPOINT)
    weight = read_class_weights(run, state)
    head.load_full_state({**state["head"], **({} if weight is None else {"weight": weight})})
    if data is None and not held_out and not people:
        raise ConfigError(f"{run} holds out nothing. Name a benchmark, such as --people or --data")
    own = training_angles(embed, trained_on, head.class_weights())
    about = [("Head", _describe_head(config)), *training_angle_rows(own)]
    if report is not None:
        write_report(report, f"Run {config.name}", dict(about), evidence, [*held_out, *people])
    return [*about, *people_figures(held_out), *(lfw_figures(evidence) if evidence else ())]


def _describe_head(config: RunConfig) -> str:
    options = ", ".join(f"{k}={v}" for k, v in config.head.options.items())
    terms = "".join(f" + {t.weight:g} {t.name}" for t in config.terms)
    return f"{config.head.name}{f' ({options})' if options else ''}{terms}"


def write_report(
    path: Path,
    title: str,
    about: Mapping[str, str] | None = None,
    lfw: LfwResult | None = None,
    people: Sequence[MeasuredPeople] = (),
) -> None:
    """Write every figure to ``path``, which ends with .json, and beside it one picture with the suffix .png: the curves
    on LFW, or without these the worst pairs of ``people``, if there are any.

    Args:
        about: further values by name.
        lfw: result on LFW.
        people: results on sets of people.
    """
    document = {
        "title": title,
        "about": dict(about or {}),
        "people": [
            {"title": one.title} | {name: getattr(one.result, name) for name in PEOPLE_FIGURES} for one in people
        ],
        "lfw": None if lfw is None else lfw.as_dict(),
    }
    picture = (None if lfw is None else _curves(lfw)) or worst_pairs(people)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")
    if picture is not None:
        path.with_suffix(".png").write_bytes(plots.png(picture))


def _curves(lfw: LfwResult) -> plots.Figure | None:
    """Draw the curves of View 2 and of the open set, if both were measured."""
    view1 = lfw.view1
    if lfw.view2 is None or lfw.open_set is None:
        return None
    pairs = read_pairs(lfw.root / "pairs.txt")
    similarities = lfw.embeddings.similarities(pairs)
    threshold = view1.threshold if view1 else best_threshold(similarities, pairs.same)
    origin = "chosen on View 1" if view1 else "best on the same pairs"
    protocol = read_open_set(lfw.root / "openset_protocol.json")
    gallery, mated, strangers = (
        lfw.embeddings.vectors[lfw.embeddings.rows(files)].astype(np.float64)
        for files in (protocol.gallery, protocol.mated, protocol.strangers)
    )
    hits, alarms = search_gallery(gallery, mated, protocol.mates(), strangers)
    return plots.curves(similarities, pairs.same, threshold, origin, hits, alarms)


def lfw_figures(result: LfwResult) -> list[tuple[str, str]]:
    """Return names and values of all results, with their 95 % intervals over people, for a table."""
    rows, found, angles = list[tuple[str, str]](), result.as_dict(), result.angles
    if result.view1 is not None:
        rows.append(("LFW View 1 accuracy, threshold of its training pairs", f"{result.view1.accuracy:.2%}"))
    return [
        *rows,
        *metric_rows({"lfw_view2": found["view2"], "lfw_open_set": found["open_set"]}),
        ("LFW Intra: mean angle to the class center", f"{angles.intra:.2f}°"),
        ("LFW Inter: mean angle to the nearest other center", f"{angles.inter:.2f}°"),
    ]
