"""dlib's public-domain face network as a pack: converted, with the bundled detector, a calibration and a card.

Its crop is not ArcFace's: it was trained on 150x150 chips closer to the face. The window was chosen on LFW View 1 (see
docs/decisions/0013).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import onnx

from models.alignment import TEMPLATE_XY, Alignment
from models.dlib_resnet import DIMENSION, SIDE_PX, to_onnx
from models.pack import BUNDLED, ModelPack, load_pack, write_pack

NAME: Final = "dlib-resnet"
EVIDENCE: Final = Path(__file__).parent / "evidence" / f"{NAME}.json"
"""What `kith-train measure` wrote of this very pack."""
WINDOW: Final = (8.0, 23.0, 96.0)
"""What a chip shows: left, top and side in pixels of the standard 112x112 crop."""

CARD: Final = """# {name}

dlib's face recognition ResNet (D. King, 2017): 29 convolutions, {dimension} dimensions, 22 MB. Converted to ONNX by
Kith from `{file}` in `{source}`
(sha256 {sha256}).

- Recogniser: released into the public domain by its author (CC0-1.0), who states that it was learned from about 3
  million photos of 7,485 people, half of them of VGGFace and FaceScrub and the rest collected from the internet, that
  nobody of LFW is among them, and an accuracy of 99.38 % on LFW (dlib-models' README). What the people in those photos
  agreed to is not known.
- Detector: the bundled pack's, under its terms: non-commercial research (see that pack's card).
- Crop: 150x150, by a template of its own; InsightFace cuts no such crops and cannot use this pack.
- Calibration: LFW View 1 ({images:,} photos of {people:,} people, {impostor_pairs:,} impostor and
  {genuine_pairs:,} genuine pairs), through the bundled detector.

## Figures

Through the bundled detector, as served; nothing is flip-averaged, jittered or averaged.

| Measure | Value |
|---|---|
{rows}

View 2 is LFW's ten-fold protocol; open set: 610 people enrolled with one photo each, 4,397 mated probes, 4,069
strangers, thresholds by hindsight.

## Not for

Deciding alone about anybody's rights, access or freedom; surveillance; emergencies. Faces unlike those it was learned
from must be expected to do worse; LFW cannot show by how much.
"""


def alignment() -> Alignment:
    """Where the five points go in its chips."""
    left, top, side = WINDOW
    # A pixel's centre lies half a pixel from its edge, in the crop as in the chip.
    points = ((TEMPLATE_XY + 0.5 - (left, top)) * SIDE_PX / side - 0.5).round(4).tolist()
    return Alignment(SIDE_PX, tuple((x, y) for x, y in points))


def build(directory: Path, content: bytes, source: Mapping[str, Any]) -> ModelPack:
    """Write the pack into an empty directory.

    Args:
        content: dlib_face_recognition_resnet_model_v1.dat.
        source: where it came from, for the record: ``from``, ``file``, ``sha256``, ``licence``.

    Raises:
        DlibFormatError: it is another network, or damaged.
    """
    evidence = read_evidence()
    detector, recogniser = directory / "detector.onnx", directory / "recogniser.onnx"
    bundled = load_pack(BUNDLED)
    shutil.copyfile(bundled.detection.path, detector)
    onnx.save(to_onnx(content), str(recogniser))
    pack = write_pack(
        directory,
        NAME,
        "dlib ResNet",
        detector,
        recogniser,
        DIMENSION,
        evidence["calibration"],
        {"recogniser": dict(source), "detector": {"pack": bundled.model_id}},
        evidence["metrics"],
        alignment(),
        embedded=True,
        preprocessing_version="dlib-face-chip-150",
    )
    (directory / "MODEL_CARD.md").write_text(_card(pack, evidence, source), encoding="utf-8")
    return pack


def read_evidence() -> dict[str, Any]:
    """Calibration and figures of this pack, as measured when this version of Kith was made."""
    evidence: dict[str, Any] = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    return evidence


def figures(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a measured pack does on LFW, as a person would read it."""
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


def _card(pack: ModelPack, evidence: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    calibration = evidence["calibration"]
    return CARD.format(
        name=NAME,
        dimension=DIMENSION,
        file=source["file"],
        sha256=source["sha256"],
        source=source["from"],
        images=calibration["images"],
        people=calibration["people"],
        impostor_pairs=calibration["impostor_pairs"],
        genuine_pairs=calibration["genuine_pairs"],
        rows="\n".join(f"| {name} | {value} |" for name, value in figures(pack.metrics)),
    )
