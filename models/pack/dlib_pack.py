"""Packs of dlib's face network: converted recognizer, bundled detector or YuNet, calibration and model card.

The recognizer was trained on 150x150 crops that are tighter than ArcFace's. The crop window was chosen on LFW View 1
(docs/decisions/0003).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx

from models.checksums import sha256_of
from models.pack.dlib_resnet import DIMENSION, SIDE_PX, to_onnx
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.pack.writing import PackDraft, write_pack
from models.vision.alignment import TEMPLATE_XY, Alignment

NAME: Final = "dlib-resnet"
YUNET_NAME: Final = "dlib-yunet"
EVIDENCE_DIR: Final = Path(__file__).parents[1] / "evidence"
"""Output of `kith-train measure` by pack."""
CROP_WINDOW_PX: Final = (8.0, 23.0, 96.0)
"""Left, top and side of the crop in pixels of the standard 112x112 crop."""

MODEL_CARD: Final = """# {name}

dlib's face recognition ResNet (D. King, 2017): 29 convolutions, {dimension} dimensions, 22 MB. Converted to ONNX by
Kith from `{file}` in `{source}`
(sha256 {sha256}).

- Recognizer: in the public domain (CC0-1.0). Its author states that it was trained on about 3 million photos of 7,485
  people, half of them from VGGFace and FaceScrub and the rest from the internet, without overlap with LFW, and that
  its accuracy on LFW is 99.38 % (README of dlib-models). It is unknown what the people in the photos consented to.
- Detector: {detector}
- Crop: 150x150 with its own template. InsightFace does not support such crops and cannot use this pack.
- Calibration: LFW View 1 ({images:,} photos of {people:,} people, {impostor_pairs:,} impostor and
  {genuine_pairs:,} genuine pairs), with this detector.

## Figures

Measured with this detector, as in production, without flip or jitter averaging.

| Measure | Value |
|---|---|
{rows}

View 2 is LFW's ten-fold protocol. Open set: 610 people enrolled with one photo each, 4,397 mated probes, 4,069
non-mated probes, thresholds chosen on the same data.

## Not for

Sole decisions about a person's rights, access or freedom; surveillance; emergencies. Expect lower accuracy on faces
unlike the training photos; LFW cannot show by how much.
"""

BUNDLED_DETECTOR_TERMS: Final = (
    "from the bundled pack, under its terms: non-commercial research (see the card of that pack)."
)
YUNET_TERMS: Final = """YuNet (W. Wu et al., 2023), `{file}` of OpenCV Zoo
  (sha256 {sha256}), under the {license} license. It was
  trained on WIDER FACE, photos from the web that its authors collected for research. Whether terms of training photos
  bind users of a network is not settled; read the license and decide."""


@dataclass(frozen=True)
class PublishedDetector:
    """YuNet network to use instead of the bundled detector, with its source and license."""

    path: Path
    source: str
    license: str


def dlib_alignment() -> Alignment:
    """Return the alignment of dlib's 150x150 crops."""
    left, top, side = CROP_WINDOW_PX
    # Pixel centers are half a pixel from the edge in both crops.
    points = ((TEMPLATE_XY + 0.5 - (left, top)) * SIDE_PX / side - 0.5).round(4).tolist()
    return Alignment(SIDE_PX, tuple((x, y) for x, y in points))


def build_dlib_pack(
    directory: Path, content: bytes, source: Mapping[str, Any], yunet: PublishedDetector | None = None
) -> ModelPack:
    """Write the pack into an empty directory.

    Args:
        content: dlib_face_recognition_resnet_model_v1.dat.
        source: provenance with the keys ``from``, ``file``, ``sha256`` and ``license``.
        yunet: detector of dlib-yunet; None builds dlib-resnet with the bundled detector.

    Raises:
        DlibFormatError: the file is another network or damaged.
    """
    name = NAME if yunet is None else YUNET_NAME
    measurements = read_measurements(name)
    detector, recognizer = directory / "detector.onnx", directory / "recognizer.onnx"
    bundled = load_pack(BUNDLED_PACK)
    shutil.copyfile(bundled.detection.path if yunet is None else yunet.path, detector)
    onnx.save(to_onnx(content), str(recognizer))
    draft = PackDraft(
        name,
        "dlib ResNet" if yunet is None else "dlib ResNet with YuNet",
        detector,
        recognizer,
        DIMENSION,
        dlib_alignment(),
        embedded=True,
        preprocessing_version="dlib-face-chip-150",
        head="scrfd" if yunet is None else "yunet",
    )
    found = {"pack": bundled.model_id}
    terms = BUNDLED_DETECTOR_TERMS
    if yunet is not None:
        found = {
            "from": yunet.source,
            "file": yunet.path.name,
            "sha256": sha256_of(yunet.path),
            "license": yunet.license,
        }
        terms = YUNET_TERMS.format(**found)
    provenance = {"recognizer": dict(source), "detector": found}
    pack = write_pack(directory, draft, measurements["calibration"], provenance, measurements["metrics"])
    card = _format_card(pack, measurements["calibration"], source, terms)
    (directory / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    return pack


def read_measurements(name: str = NAME) -> dict[str, Any]:
    """Return the calibration and metrics of a dlib pack that ship with this version of Kith."""
    measurements: dict[str, Any] = json.loads((EVIDENCE_DIR / f"{name}.json").read_text(encoding="utf-8"))
    return measurements


def accuracy_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) rows of a pack's accuracy on LFW."""
    view2, wide = metrics["lfw_view2"], metrics["lfw_open_set"]
    return [
        ("LFW View 2 accuracy", f"{view2['accuracy']['mean']:.2%} ± {view2['accuracy']['std']:.2%}"),
        ("LFW View 2 TAR at FAR 0.1 %", f"{view2['tar_at_far_1e3']:.1%}"),
        ("LFW View 2 EER", f"{view2['eer']:.2%}"),
        ("LFW open set rank-1", f"{wide['rank1']:.1%}"),
        *(
            (f"LFW open set FNIR at FPIR {float(rate):.1%}", f"{fnir:.1%} (threshold {wide['thresholds'][rate]:.3f})")
            for rate, fnir in wide["fnir"].items()
        ),
    ]


def _format_card(pack: ModelPack, calibration: Mapping[str, Any], source: Mapping[str, Any], detector: str) -> str:
    return MODEL_CARD.format(
        name=pack.model_id,
        detector=detector,
        dimension=DIMENSION,
        file=source["file"],
        sha256=source["sha256"],
        source=source["from"],
        images=calibration["images"],
        people=calibration["people"],
        impostor_pairs=calibration["impostor_pairs"],
        genuine_pairs=calibration["genuine_pairs"],
        rows="\n".join(f"| {name} | {value} |" for name, value in accuracy_rows(pack.metrics)),
    )
