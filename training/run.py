"""Training runs, top to bottom: a recogniser, a detector, and the pack that joins them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.alignment import align
from models.detection import Canvas, Detector, lay_out
from models.pack import DetectionSpec, ModelPack, Normalisation, load_pack, write_pack
from models.runtime import Network
from training.backbones import ThinIResNet
from training.calibrate import calibrate
from training.config import BackboneConfig, ConfigError, HeadConfig, RunConfig
from training.data.identities import load_identities, read_rgb
from training.detection.data import load_annotated
from training.detection.fit import DetectorLoopConfig, fit_detector
from training.detection.network import FaceDetector
from training.evaluate import Embedder, evaluate_pack, read_pairs
from training.export import export_detector, export_recogniser
from training.loop import Checkpoint, fit, to_tensor
from training.losses import AdaCos, ArcFace, CosFace, CosineHead, NormFace
from training.report import write_model_card

PARITY_IMAGES = 32
DETECTOR_PARITY_SIDE_PX = 384


def build_backbone(config: BackboneConfig) -> ThinIResNet:
    return ThinIResNet(config.embedding_dim, config.widths, config.depths, config.stem)


def build_head(config: HeadConfig, embedding_dim: int, num_classes: int) -> CosineHead:
    match config.name:
        case "arcface":
            return ArcFace(embedding_dim, num_classes, config.scale, config.margin)
        case "cosface":
            return CosFace(embedding_dim, num_classes, config.scale, config.margin)
        case "normface":
            return NormFace(embedding_dim, num_classes, config.scale)
        case "adacos" | "adacos_fixed":
            return AdaCos(embedding_dim, num_classes, dynamic=config.name == "adacos")


def train_recogniser(config: RunConfig, detector: Detector | None = None) -> Checkpoint:
    """Learn (or resume) a recogniser; ``detector`` is needed only for photos that are not aligned crops."""
    torch.manual_seed(config.loop.seed)
    record_config(config.output, config.as_dict(), config.output / "checkpoint.pt", free=("epochs", "root", "output"))
    data = load_identities(config.data, config.output.parent / "cache", detector)
    backbone = build_backbone(config.backbone)
    head = build_head(config.head, config.backbone.embedding_dim, data.num_classes)
    return fit(backbone, head, data, config.loop, config.output)


def train_detector(data: Path, output: Path, loop: DetectorLoopConfig, start_from: Path | None = None) -> FaceDetector:
    """Learn (or resume) the detector from ``data``/wider's training photos and ``data``/scenes; ``start_from`` is an
    earlier run whose averaged weights are the beginning."""
    torch.manual_seed(loop.seed)
    record_config(output, asdict(loop), output / "detector.pt", free=("steps",))
    model = FaceDetector()
    if start_from is not None:
        model.load_state_dict(_averaged(start_from / "detector.pt"))
    photos = load_annotated(data / "wider", "train") + load_annotated(data / "scenes")
    return fit_detector(model, photos, loop, output)


def record_config(output: Path, config: dict[str, Any], checkpoint: Path, free: tuple[str, ...]) -> None:
    """Write config.json; a run with a checkpoint may only be resumed as it was begun, but for the ``free`` settings.

    Raises:
        ConfigError: another setting differs; the error names it.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / "config.json"
    config = json.loads(json.dumps(config))
    if checkpoint.exists() and path.exists():
        before, now = (dict(_leaves(document)) for document in (_read_json(path), config))
        changed = sorted(k for k in before | now if before.get(k) != now.get(k) and k.rsplit(".", 1)[-1] not in free)
        if changed:
            raise ConfigError(f"{output} was begun with other settings ({', '.join(changed)}); choose another --output")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _leaves(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def make_pack(
    recogniser: Path, detector: Path, data: Path, output: Path, name: str, display_name: str, note: str = ""
) -> ModelPack:
    """Export two finished runs, calibrate on LFW View 1, measure, and write the pack with its card.

    Raises:
        ConfigError: a run is unfinished or absent.
        ParityError: onnxruntime disagrees with torch; the pack is not written.
    """
    output.mkdir(parents=True, exist_ok=True)
    config = _read_json(recogniser / "config.json")
    backbone = build_backbone(BackboneConfig(**config["backbone"]))
    backbone.load_state_dict(_averaged(recogniser / "checkpoint.pt"))
    model = FaceDetector()
    model.load_state_dict(_averaged(detector / "detector.pt"))

    detector_file, recogniser_file = output / "detector.onnx", output / "recogniser.onnx"
    photos = load_annotated(data / "wider", "val")[:4]
    canvas = Canvas(DETECTOR_PARITY_SIDE_PX, DETECTOR_PARITY_SIDE_PX, 1.0)
    side = DETECTOR_PARITY_SIDE_PX
    normalisation = Normalisation(127.5, 128.0)
    batch = np.stack([lay_out(photo.image[:side, :side], canvas, normalisation) for photo in photos])
    shift = export_detector(model, torch.from_numpy(batch), detector_file, {"kith.run": name})

    spec = DetectionSpec(detector_file, None, normalisation, "scrfd", "insightface-scrfd-1")
    finder = Detector(Network(detector_file), spec)
    cosine = export_recogniser(
        backbone, to_tensor(_lfw_crops(finder, data / "lfw")), recogniser_file, {"kith.run": name}
    )

    # Where things lay is nobody's business; what they were is.
    recorded = {k: v for k, v in config.items() if k != "output"}
    recorded["data"] = {**config["data"], "root": Path(config["data"]["root"]).name}
    provenance: dict[str, Any] = {
        "recogniser": {"run": recorded, "parity_worst_cosine": cosine},
        "detector": {"run": _read_json(detector / "config.json"), "parity_worst_shift_strides": shift},
    }
    dimension = int(config["backbone"]["embedding_dim"])
    draft = write_pack(output, name, display_name, detector_file, recogniser_file, dimension, {}, provenance, {})
    evidence = _calibration(draft, data / "lfw")
    metrics = evaluate_pack(draft, data)
    pack = write_pack(
        output, name, display_name, detector_file, recogniser_file, dimension, evidence, provenance, metrics
    )
    write_model_card(pack, note)
    return load_pack(output)


def _calibration(pack: ModelPack, lfw: Path) -> dict[str, Any]:
    """Everybody against everybody among the photos of View 1's training list, through the pack's own detector."""
    pairs = read_pairs(lfw / "pairsDevTrain.txt")
    files = sorted({*pairs.first, *pairs.second})
    vectors, found = Embedder(pack).embed([lfw / "images" / file for file in files])
    people = [file.split("/")[0] for file, kept in zip(files, found, strict=True) if kept]
    return calibrate(vectors[found], people, "LFW View 1, pairsDevTrain, central face of each photo")


def _lfw_crops(detector: Detector, lfw: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    files = sorted(set(read_pairs(lfw / "pairsDevTrain.txt").first))[:PARITY_IMAGES]
    crops = []
    for file in files:
        image = read_rgb(lfw / "images" / file)
        faces = detector.detect([image])[0]
        if len(faces):
            crops.append(align(image, faces.landmarks_xy[:1])[0])
    return np.stack(crops)


def _averaged(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: train first")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)["averaged"]
    return state


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: train first")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
