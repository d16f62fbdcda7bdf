"""Finished runs into files that serve: a network, a pack with its evidence and its card."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.alignment import align
from models.detection import Canvas, Detector, lay_out
from models.errors import PackError
from models.pack import (
    DetectionSpec,
    ModelPack,
    Normalisation,
    load_pack,
    replace_calibration,
    sha256_of,
    update_manifest,
    write_pack,
)
from models.runtime import OnnxNetwork
from training.benchmarks import Embed, LfwCrops, judge, load_lfw_crops
from training.calibrate import calibrate
from training.config import ConfigError, DataConfig, RunConfig
from training.data.identities import list_identities, load_identities, read_rgb
from training.data.spread import at_most, spread_rows
from training.detection.data import load_annotated
from training.detection.fit import DETECTOR_CHECKPOINT
from training.detection.network import FaceDetector
from training.evaluate import VIEW1, Embedder, evaluate_pack, read_pairs
from training.export import Centred, Precision, export_detector, export_int8, export_recogniser
from training.finished import Crops, load_run
from training.loop import to_tensor
from training.recipes import departures
from training.report import check_provenance, write_model_card
from training.run_folder import CONFIG, averaged_weights, read_json
from training.variants import quantise_pack

PARITY_IMAGES = 32
INT8_CALIBRATION_IMAGES = 256
MEAN_IMAGES = 2000
DETECTOR_PARITY_SIDE_PX = 384


def export_run(run: Path, output: Path, precision: Precision, lfw: Path | None, detection: DetectionSpec) -> float:
    """Write a run's network as ONNX and return its worst cosine to torch's, on the run's own crops.

    Raises:
        ConfigError: int8 without ``lfw``, on whose View 1 it is judged.
        ParityError: onnxruntime disagrees with torch, or int8 loses too much accuracy; nothing is written.
    """
    config, backbone = load_run(run)
    crops = load_identities(config.data, config.output.parent / "cache").crops_NHWC
    output.parent.mkdir(parents=True, exist_ok=True)
    benchmark = None
    if precision == "int8":
        if lfw is None:
            raise ConfigError("int8 is judged on LFW View 1: name the data with --data")
        benchmark = load_lfw_crops(lfw, detection, run.parent / "cache", VIEW1)
    return _write_recogniser(
        config, backbone, crops[spread_rows(len(crops), PARITY_IMAGES)], output, precision, benchmark
    )


def make_pack(
    recogniser: Path,
    detector: Path | ModelPack,
    data: Path,
    output: Path,
    name: str,
    display_name: str,
    note: str = "",
    terms: str | None = None,
    precision: Precision = "fp16",
    log: str | None = None,
    centre: float = 0.0,
) -> ModelPack:
    """Export finished runs, calibrate on LFW View 1, measure, and write the pack with its card.

    Args:
        detector: a finished detector run, or a pack whose detector is taken over.
        terms: of the recogniser's data, for the card.
        log: for the card, where it is told what was tried.
        centre: how much of the mean embedding of the run's crops is taken off every embedding, in [0, 1].

    Raises:
        ConfigError: a run is unfinished or absent.
        ParityError: onnxruntime disagrees with torch; the pack is not written.
    """
    output.mkdir(parents=True, exist_ok=True)
    config, backbone = load_run(recogniser)
    if centre:
        backbone = Centred(backbone, centre * _mean_embedding(config, backbone)).eval()
    detector_file, recogniser_file = output / "detector.onnx", output / "recogniser.onnx"
    normalisation = Normalisation(127.5, 128.0)
    if isinstance(detector, ModelPack):
        if (detector.detection.head, detector.detection.normalisation) != ("scrfd", normalisation):
            raise ConfigError(f"the detector of {detector.model_id} is of another kind; name a detector run")
        shutil.copyfile(detector.detection.path, detector_file)
        detector_provenance = detector.provenance.get("detector", {"pack": detector.model_id})
    else:
        detector_provenance = _export_detector(detector, data, detector_file, name, normalisation)

    spec = DetectionSpec(detector_file, None, normalisation, "scrfd", "insightface-scrfd-1")
    finder = Detector(OnnxNetwork(detector_file), spec)
    view1 = load_lfw_crops(data / "lfw", spec, recogniser.parent / "cache", VIEW1) if precision == "int8" else None
    cosine = _write_recogniser(config, backbone, _lfw_crops(finder, data / "lfw"), recogniser_file, precision, view1)

    provenance: dict[str, Any] = {
        "recogniser": {
            "run": config.shareable(),
            "data": _counted(config, terms),
            "precision": precision,
            "centre": centre,
            "parity_worst_cosine": cosine,
        },
        "detector": detector_provenance,
        "note": note,
        "log": log,
    }
    dimension = config.backbone.embedding_dim
    draft = write_pack(output, name, display_name, detector_file, recogniser_file, dimension, {}, provenance, {})
    cache = recogniser.parent / "cache"
    evidence = _calibration(draft, data / "lfw", cache)
    metrics = evaluate_pack(draft, data, cache_dir=cache)
    pack = write_pack(
        output, name, display_name, detector_file, recogniser_file, dimension, evidence, provenance, metrics
    )
    write_model_card(pack, departures(provenance["recogniser"]["run"]))
    return pack


def refresh_pack(
    directory: Path, data: Path, cache_dir: Path, note: str | None = None, log: str | None = None
) -> ModelPack:
    """Measure a pack whose networks are there, and write its figures and its card anew; ``note`` and ``log`` replace
    those of the card where they are given.

    Raises:
        PackError: the pack has no manifest version 2.
        ConfigError: the manifest does not tell from which run and data the pack came.
    """
    pack = load_pack(directory)
    check_provenance(pack)
    said = {key: value for key, value in (("note", note), ("log", log)) if value is not None}
    metrics = evaluate_pack(pack, data, cache_dir=cache_dir)
    measured = update_manifest(pack.directory, {**pack.provenance, **said}, metrics)
    write_model_card(measured, departures(pack.provenance["recogniser"]["run"]))
    return measured


def write_variants(directory: Path, data: Path, cache_dir: Path) -> ModelPack:
    """:func:`training.variants.quantise_pack`, and the pack's card anew if it has one."""
    pack = quantise_pack(directory, data, cache_dir)
    if (pack.directory / "MODEL_CARD.md").is_file():
        check_provenance(pack)
        write_model_card(pack, departures(pack.provenance["recogniser"]["run"]))
    return pack


def calibrate_pack(
    directory: Path, data: DataConfig, max_photos_per_person: int | None = None, note: str = ""
) -> ModelPack:
    """Give a pack, or an unversioned directory of ONNX files, thresholds at a risk: its own networks on somebody's own
    people, everybody against everybody.

    Args:
        max_photos_per_person: of people with more, so many are taken, evenly from all.
        note: what these photos are, for the record.

    Raises:
        PackError: there is no pack, or it cannot be written to.
        ConfigError: no people, an unreadable photo, or too few pairs; the pack is as it was.
    """
    pack = load_pack(directory)
    if not os.access(pack.directory, os.W_OK):
        raise PackError("calibration", f"cannot be written into {pack.directory}: copy the pack and calibrate the copy")
    listed = list_identities(data)
    rows = at_most(max_photos_per_person, listed.labels)
    vectors, found = Embedder(pack).embed_people(listed, rows, data.aligned)
    try:
        # The folder's name and never its path, which may tell of people and machines.
        evidence = calibrate(vectors[found], listed.labels[rows[found]].tolist(), data.root.resolve().name)
    except ValueError as error:
        raise ConfigError(f"{data.root}: {error}; {int((~found).sum())} photos show no face") from error
    about = {"note": note, "photos_without_face": int((~found).sum()), "recogniser": pack.recognition.fingerprint()}
    return replace_calibration(pack, {**evidence, **about})


def measure_pack(pack: ModelPack, data: Path, cache_dir: Path | None = None) -> dict[str, Any]:
    """What a pack that somebody else made lacks: the evidence for its thresholds, and its figures, with what they were
    measured on: JSON-ready. What its networks answer is kept in ``cache_dir``."""
    return {
        "detector_sha256": sha256_of(pack.detection.path),
        "recogniser": pack.recognition.fingerprint(),
        "calibration": _calibration(pack, data / "lfw", cache_dir),
        "metrics": evaluate_pack(pack, data, cache_dir=cache_dir),
    }


def _write_recogniser(
    config: RunConfig, backbone: nn.Module, crops: Crops, output: Path, precision: Precision, view1: LfwCrops | None
) -> float:
    metadata = {
        "kith.run": config.name,
        "kith.input": "RGB, 112x112, (x - 127.5) / 127.5",
        "kith.embedding": f"{config.backbone.embedding_dim}, not normalised",
    }
    if precision != "int8" or view1 is None:
        return export_recogniser(
            backbone, to_tensor(crops), output, metadata, "fp32" if precision == "fp32" else "fp16"
        )
    calibration = load_identities(config.data, config.output.parent / "cache").crops_NHWC
    return export_int8(
        backbone,
        to_tensor(crops),
        to_tensor(calibration[spread_rows(len(calibration), INT8_CALIBRATION_IMAGES)]),
        output,
        metadata,
        lambda embed: _view1_accuracy(embed, view1),
    )


def _view1_accuracy(embed: Embed, crops: LfwCrops) -> float:
    view1 = judge(embed, crops).view1
    assert view1 is not None  # noqa: S101  # these crops are View 1's
    return view1.best_accuracy


@torch.no_grad()
def _mean_embedding(config: RunConfig, backbone: nn.Module) -> Tensor:
    """(D,) mean over crops of all people, as they are, before normalisation."""
    everyone = load_identities(config.data, config.output.parent / "cache").crops_NHWC
    crops = to_tensor(everyone[spread_rows(len(everyone), MEAN_IMAGES)])
    return torch.cat([backbone(crops[i : i + 128]).float() for i in range(0, len(crops), 128)]).mean(0)


def _export_detector(run: Path, data: Path, path: Path, name: str, normalisation: Normalisation) -> dict[str, Any]:
    model = FaceDetector()
    model.load_state_dict(averaged_weights(run / DETECTOR_CHECKPOINT))
    photos = load_annotated(data / "wider", "val")[:4]
    side = DETECTOR_PARITY_SIDE_PX
    canvas = Canvas(side, side, 1.0)
    batch = np.stack([lay_out(photo.image[:side, :side], canvas, normalisation) for photo in photos])
    shift = export_detector(model, torch.from_numpy(batch), path, {"kith.run": name})
    return {"run": read_json(run / CONFIG), "parity_worst_shift_strides": shift}


def _counted(config: RunConfig, terms: str | None) -> dict[str, Any]:
    listed = list_identities(config.data)
    return {"images": len(listed), "people": len(listed.names), "terms": terms}


def _calibration(pack: ModelPack, lfw: Path, cache_dir: Path | None) -> dict[str, Any]:
    """Everybody against everybody among the photos of View 1's training list, through the pack's own detector."""
    pairs = read_pairs(lfw / "pairsDevTrain.txt")
    files = sorted({*pairs.first, *pairs.second})
    embedder = Embedder(pack, cache_dir=cache_dir)
    vectors, found = embedder.embed([lfw / "images" / file for file in files])
    embedder.remember()
    people = [file.split("/")[0] for file, kept in zip(files, found, strict=True) if kept]
    evidence = calibrate(vectors[found], people, "LFW View 1, pairsDevTrain, central face of each photo")
    return {**evidence, "photos_without_face": int((~found).sum()), "recogniser": pack.recognition.fingerprint()}


def _lfw_crops(detector: Detector, lfw: Path) -> Crops:
    files = sorted(set(read_pairs(lfw / "pairsDevTrain.txt").first))[:PARITY_IMAGES]
    crops = []
    for file in files:
        image = read_rgb(lfw / "images" / file)
        faces = detector.detect([image])[0]
        if len(faces):
            crops.append(align(image, faces.landmarks_xy[:1])[0])
    return np.stack(crops)
