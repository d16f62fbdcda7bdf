"""Figures of a model card: a pack measured on LFW and WIDER FACE, through its own detector."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.engines.selection import open_fp32
from models.pack.manifest import ModelPack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from training.evaluation.detection import evaluate_detection
from training.evaluation.embedding import Embeddings
from training.evaluation.lfw import (
    PARTS,
    VIEW1,
    Part,
    embed_lfw,
    identify,
    load_lfw_crops,
    read_open_set,
    read_pairs,
    verify,
)

log = logging.getLogger(__name__)


def embed_pack(
    pack: ModelPack, lfw: Path, cache: Path, parts: Collection[Part], aligned: Collection[Part] = PARTS
) -> Embeddings:
    """Embed the photos of parts of LFW. The crops of the parts ``aligned`` are made once for a detector, and kept in
    ``cache``."""
    alignment = pack.recognition.alignment
    crops = load_lfw_crops(lfw, pack.detection, cache, aligned, alignment)
    recognizer = Recognizer(open_fp32(pack.recognition.path), pack.recognition)
    return embed_lfw(recognizer.embed, crops, parts=parts)


def evaluate_pack(pack: ModelPack, data: Path, cache: Path, view1_only: bool = False) -> dict[str, Any]:
    """Compute all figures of the model card.

    Args:
        data: folder with lfw/ and wider/ (see docs/training.md).
        cache: folder of LFW's crops, shared with other packs of this detector and with runs.
        view1_only: only LFW View 1.
    """
    lfw = data / "lfw"
    parts = VIEW1 if view1_only else PARTS
    embeddings = embed_pack(pack, lfw, cache, parts, aligned=parts)
    report: dict[str, Any] = {"lfw_view1": asdict(verify(embeddings, read_pairs(lfw / "pairsDevTest.txt")))}
    if not view1_only:
        log.info("LFW: intervals of View 2 and the open set")
        protocol = read_open_set(lfw / "openset_protocol.json")
        report["lfw_view2"] = asdict(verify(embeddings, read_pairs(lfw / "pairs.txt")))
        report["lfw_open_set"] = asdict(identify(embeddings, protocol))
        log.info("WIDER FACE and landmarks on LFW: the detector")
        report |= evaluate_detection(Detector(OnnxNetwork(pack.detection.path), pack.detection), data)
        report["counts"] |= {name: len(files) for name, files in vars(protocol).items()}
    return report
