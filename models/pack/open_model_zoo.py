"""Pack of a recognizer of Intel's Open Model Zoo, in OpenVINO's format, with YuNet, a calibration and a model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.checksums import sha256_of
from models.pack.evidence import read_evidence
from models.pack.manifest import ModelPack
from models.pack.writing import PackDraft, write_pack
from models.runtime.network import weights_file
from models.vision.alignment import Alignment

NAME: Final = "open-model-zoo"
DIMENSION: Final = 256
SIDE_PX: Final = 128
TEMPLATE: Final = ((0.3156, 0.4616), (0.6827, 0.4616), (0.5003, 0.6405), (0.3495, 0.8247), (0.6534, 0.8247))
"""Landmarks as shares of the crop's side (README.md of face-reidentification-retail-0095)."""
ALIGNMENT: Final = Alignment(SIDE_PX, tuple((x * SIDE_PX, y * SIDE_PX) for x, y in TEMPLATE))

MODEL_CARD: Final = """# {name}

Intel's `face-reidentification-retail-0095` (Open Model Zoo 2023.0): MobileNetV2 bottlenecks with squeeze-excitation,
1.1 million weights, {dimension} dimensions. In OpenVINO's format, which OpenVINO
runs on CPUs; Kith does not serve it on GPUs.

- Recognizer: `{recognizer_file}` of {recognizer_from}
  (sha256 {recognizer_sha256}), {recognizer_license}. Its
  training photos are not stated.
- Detector: YuNet (W. Wu et al., 2023), `{detector_file}` of {detector_from}
  (sha256 {detector_sha256}), {detector_license}. It was
  trained on WIDER FACE, photos from the web that its authors collected for research. Whether terms of training photos
  bind users of a network is not settled; read the license and decide.
- Crop: {side}x{side} with its own template. InsightFace cannot use this pack.
- Calibration: LFW View 1 ({images:,} photos of {people:,} people, {impostor_pairs:,} impostor and
  {genuine_pairs:,} genuine pairs).

## Figures

Measured without flip or jitter averaging, with the YuNet network of sha256
{measured_detector}.

| Measure | Value |
|---|---|
{rows}

View 2 is LFW's ten-fold protocol. Open set: 610 people enrolled with one photo each, 4,397 mated probes, 4,069
non-mated probes, thresholds chosen on the same data.

## Not for

Sole decisions about a person's rights, access or freedom; surveillance; emergencies. Expect lower accuracy on faces
unlike the training photos; LFW cannot show by how much.
"""


def build_open_model_zoo_pack(
    directory: Path, xml: Path, weights: Path, detector: Path, provenance: Mapping[str, Mapping[str, str]]
) -> ModelPack:
    """Write the pack into an empty directory.

    Args:
        xml: face-reidentification-retail-0095.xml, and ``weights`` its .bin.
        detector: YuNet.
        provenance: of ``recognizer`` and ``detector``, each with ``from``, ``file``, ``sha256`` and ``license``.

    Raises:
        PackError: the pack does not load.
    """
    measurements = read_evidence(NAME)
    found, recognizer = directory / "detector.onnx", directory / "recognizer.xml"
    found.write_bytes(detector.read_bytes())
    recognizer.write_bytes(xml.read_bytes())
    weights_file(recognizer).write_bytes(weights.read_bytes())
    draft = PackDraft(
        NAME,
        "Open Model Zoo 0095 with YuNet",
        found,
        recognizer,
        DIMENSION,
        ALIGNMENT,
        embedded=True,
        color="BGR",
        preprocessing_version="retail-0095-128",
        head="yunet",
    )
    pack = write_pack(directory, draft, measurements["calibration"], provenance, measurements["metrics"])
    calibration = measurements["calibration"]
    card = MODEL_CARD.format(
        name=NAME,
        dimension=DIMENSION,
        side=SIDE_PX,
        **{f"{part}_{key}": value for part, source in provenance.items() for key, value in source.items()},
        **{key: calibration[key] for key in ("images", "people", "impostor_pairs", "genuine_pairs")},
        measured_detector=measurements["detector_sha256"],
        rows="\n".join(f"| {name} | {value} |" for name, value in accuracy_rows(pack.metrics)),
    )
    (directory / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    return pack


def describe_source(file: Path, source: str, license: str) -> dict[str, str]:
    """Return the provenance of a published file."""
    return {"from": source, "file": file.name, "sha256": sha256_of(file), "license": license}


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
