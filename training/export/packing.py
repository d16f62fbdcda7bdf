"""Export of finished runs as ONNX files and packs, with calibration, metrics and model card."""

from __future__ import annotations

import logging
import os
import shutil
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from models.checksums import sha256_of
from models.errors import PackError
from models.pack.loading import load_pack
from models.pack.manifest import ModelPack
from models.pack.writing import replace_calibration, update_manifest, write_pack
from models.vision.specs import Normalization
from training.config import ConfigError, DataConfig, RunConfig
from training.data.identities import load_identities
from training.data.subsampling import evenly_spaced_rows, limit_per_label
from training.evaluation.embedding import Embedder, embed_people
from training.evaluation.lfw import VIEW1, read_pairs
from training.evaluation.pack_evaluation import embed_pack, evaluate_pack
from training.export.calibrate import calibrate
from training.export.model_card import update_model_card, write_model_card
from training.export.onnx_export import ExportPrecision, export_recognizer
from training.optimization.loop import to_tensor
from training.optimization.run_folder import CHECKPOINT, load_checkpoint, load_run, read_run_config

log = logging.getLogger(__name__)
CACHED: Final = "which takes some minutes; evaluate and later packs use the same crops"
PARITY_IMAGES = 32


def export_run(run: Path, output: Path, precision: ExportPrecision) -> float:
    """Write the network of a run as ONNX; return the worst cosine to torch on crops of the run. Raises ParityError if
    onnxruntime disagrees with torch; nothing is written. Imported weights have no crops, and are compared on noise."""
    config, backbone = load_run(run)
    backbone = backbone.cpu()  # onnxruntime and the crops are there
    side = config.data.crop_px
    if config.imported:
        crops = np.random.default_rng(0).integers(0, 256, (PARITY_IMAGES, side, side, 3), np.uint8)
    else:
        crops = load_identities(config.data, config.output.parent / "cache").crops_NHWC
    metadata = {
        "kith.run": config.name,
        "kith.input": f"RGB, {side}x{side}, (x - 127.5) / 127.5",
        "kith.embedding": f"{config.backbone.embedding_dim}, not normalized",
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    chosen = to_tensor(crops[evenly_spaced_rows(len(crops), PARITY_IMAGES)])
    return export_recognizer(backbone, chosen, output, metadata, precision)


def make_pack(
    run: Path,
    detector: ModelPack,
    data: Path,
    output: Path,
    name: str,
    display_name: str,
    terms: str | None = None,
    precision: ExportPrecision = "fp16",
) -> ModelPack:
    """Export a finished run, calibrate on LFW View 1, measure, and write the pack with its model card.

    Args:
        detector: a pack whose detector is reused.
        terms: terms of the training photos, for the model card.
        precision: precision of the recognizer.

    Raises:
        ConfigError: the run is missing or unfinished, or the detector has another architecture.
        ParityError: onnxruntime disagrees with torch; the pack is not written.
    """
    began, cache = time.monotonic(), crop_cache(run)
    if output.resolve() == detector.directory:
        raise ConfigError(f"{output} is a pack whose network is reused. Name another output folder")
    output.mkdir(parents=True, exist_ok=True)
    log.info("1 of 3: write the networks")
    detector_file, recognizer_file = output / "detector.onnx", output / "recognizer.onnx"
    detector_provenance = _write_detector(detector, detector_file)
    cosine, config = export_run(run, recognizer_file, precision), read_run_config(run)
    tasks = manifest_tasks(config.data.crop_px, config.backbone.embedding_dim)
    provenance = {
        "recognizer": {
            "run": config.shareable(),
            "data": _describe_data(run, config, terms),
            "precision": precision,
            "parity_worst_cosine": cosine,
        },
        "detector": detector_provenance,
    }
    uncalibrated = write_pack(output, name, display_name, tasks, {}, provenance, {})
    log.info("2 of 3: calibrate on LFW View 1. The first time, LFW is aligned for this detector, %s", CACHED)
    evidence = _calibration(uncalibrated, data / "lfw", cache)
    log.info("3 of 3: measure on LFW and WIDER FACE")
    metrics = evaluate_pack(uncalibrated, data, cache)
    log.info("the pack took %s", timedelta(seconds=round(time.monotonic() - began)))
    pack = write_pack(output, name, display_name, tasks, evidence, provenance, metrics)
    write_model_card(pack)
    return pack


def manifest_tasks(crop_px: int, dimension: int) -> dict[str, dict[str, Any]]:
    """Return the tasks of a manifest: an SCRFD detector, and a recognizer of standard crops."""
    return {
        "detection": {
            "file": "detector.onnx",
            "preprocessing": {"mean": 127.5, "std": 128.0},
            "preprocessing_version": "insightface-scrfd-1",
        },
        "recognition": {
            "file": "recognizer.onnx",
            "preprocessing": {"mean": 127.5, "std": 127.5},
            "preprocessing_version": "insightface-arcface-1",
            "input_size": [crop_px, crop_px],
            "embedding_dimension": dimension,
        },
    }


def crop_cache(recognizer: Path | ModelPack) -> Path:
    """Return the folder of LFW's crops that `kith-train evaluate` uses: beside a run, or in runs/ for a pack."""
    return (recognizer.parent if isinstance(recognizer, Path) else Path("runs")) / "cache"


def refresh_pack(directory: Path, data: Path) -> ModelPack:
    """Measure an existing pack, and replace the figures of its manifest and of its model card. Raises PackError if the
    pack has no manifest version 2."""
    pack = load_pack(directory)
    measured = update_manifest(pack.directory, pack.provenance, evaluate_pack(pack, data, crop_cache(pack)))
    update_model_card(measured)
    return measured


def calibrate_pack(
    directory: Path, data: DataConfig, max_photos_per_person: int | None = None, note: str = ""
) -> ModelPack:
    """Calibrate a pack, or an unversioned directory of ONNX files, on the user's own photos.

    Args:
        max_photos_per_person: limit per person, evenly spaced; None means all.
        note: description of the photos, for the record.

    Raises:
        PackError: the pack is missing or read-only.
        ConfigError: unreadable photos or too few pairs; the pack is unchanged.
    """
    pack = load_pack(directory)
    if not os.access(pack.directory, os.W_OK):
        raise PackError("calibration", f"{pack.directory} is read-only: copy the pack and calibrate the copy")
    by, choose = Embedder(pack), partial(limit_per_label, max_photos_per_person)
    with TemporaryDirectory() as crops:  # faces: none is left on the disk
        people, vectors = embed_people(
            by.recognizer.embed, by.recognizer.alignment, by.detector, data, Path(crops), choose
        )
    try:
        # Record the folder name only: its path may contain personal data.
        evidence = calibrate(vectors, people.labels.tolist(), data.root.resolve().name)
    except ValueError as error:
        raise ConfigError(f"{data.root}: {error}; {people.without_face} photos have no detected face") from error
    about = {"note": note, "photos_without_face": people.without_face, "recognizer": pack.recognition.fingerprint()}
    return replace_calibration(pack, {**evidence, **about})


def measure_pack(pack: ModelPack, data: Path) -> dict[str, Any]:
    """Calibrate and measure a third-party pack. Return a JSON-ready document with the hashes of its networks."""
    return {
        "detector_sha256": sha256_of(pack.detection.path),
        "recognizer": pack.recognition.fingerprint(),
        "calibration": _calibration(pack, data / "lfw", crop_cache(pack)),
        "metrics": evaluate_pack(pack, data, crop_cache(pack)),
    }


def _write_detector(detector: ModelPack, output: Path) -> dict[str, Any]:
    """Copy the detector of a pack. Return its provenance."""
    if (detector.detection.head, detector.detection.normalization) != ("scrfd", Normalization(127.5, 128.0)):
        raise ConfigError(f"the detector of {detector.model_id} has another architecture. Name a pack made by Kith")
    shutil.copyfile(detector.detection.path, output)
    return {"pack": detector.model_id, **detector.provenance.get("detector", {})}


def _describe_data(run: Path, config: RunConfig, terms: str | None) -> dict[str, Any]:
    """Return what a run was trained on. The data may have changed since."""
    if config.imported:
        return {"images": 0, "people": 0, "terms": terms}
    state = load_checkpoint(run / CHECKPOINT)
    return {"images": int(state["images"]), "people": len(state["classes"]), "terms": terms}


def _calibration(pack: ModelPack, lfw: Path, cache: Path) -> dict[str, Any]:
    """Compare the photos of View 1's training list with each other, through the pack's own detector."""
    pairs = read_pairs(lfw / "pairsDevTrain.txt")
    embeddings = embed_pack(pack, lfw, cache, VIEW1)
    rows = embeddings.rows(sorted({*pairs.first, *pairs.second}))
    kept = rows[embeddings.found[rows]]
    people = [embeddings.files[row].split("/")[0] for row in kept]
    evidence = calibrate(embeddings.vectors[kept], people, "LFW View 1, pairsDevTrain, central face of each photo")
    return {**evidence, "photos_without_face": len(rows) - len(kept), "recognizer": pack.recognition.fingerprint()}
