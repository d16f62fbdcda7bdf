"""Model card of a pack: a text whose figures are filled in from its manifest and calibration.

Braces name a figure. Whatever names a figure that nobody measured is left out: a part in [[double brackets]], a row, an
item of a list, a block between blank lines, and with its first block a section. A card that is written may be edited:
later measurements replace the figures in it, and nothing else.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.pack.manifest import ModelPack
from training.evaluation.figures import fill, metric_rows

CARD: Final = """# {model_id}

{display_name}: a face detector and a face recognizer ({run[backbone][name]}, {dimension} dimensions). `kith-train pack`
wrote this card, and `kith-train evaluate --refresh` replaces its figures.

## Training data

- Recognizer: {crops}[[ ({run[data][root]})]], {taught}. {data_terms}
- Detector: [[from the pack {detector[pack]}: ]][[{detector_photos}. ]]{detector_terms}
- {calibrated}
- `manifest.json` has the settings of the run[[, of the recipe {run[name]}]].

**Terms.** A pack is as free as its least free part: networks, training photos, and the photos of teachers and labeling
networks.

**Overlap of people.** The figures below are too good, by an unknown amount, if the training photos or those of a
teacher show people of the photos that measure them. Kith does not check this.

## Figures

All figures use the detector and alignment of the pack, as served, without flip averaging. Intervals are 95 %, over
people on LFW and over photos on WIDER.

| Measure | Value |
|---|---|
{figures}

View 2 is LFW's ten-fold protocol: each fold uses the threshold of the other nine. A photo without a detected face has
similarity 0 to all others. Open set: [[{counts[gallery]:,} people with one photo each, {counts[mated]:,} mated probes,
{counts[strangers]:,} strangers, ]]thresholds chosen on the same data. WIDER: [[{counts[wider_photos]:,} validation
photos, ]]IoU 0.5. Landmark error: mean distance of five points to YuNet's, in eye distances.

## Limitations

- The recognizer was trained on {crops}[[: {fewer}]]. Expect worse results for faces that are rare in the
  training data[[, or {in_teachers}]]. LFW has no labels of age, sex or skin color, few children and few people over
  eighty. The figures on LFW cannot show the difference and do not hold for everyone.
- No figure shows how many masked faces and strong profiles the detector misses. Landmarks in upside-down photos are not
  measured: the service tries other orientations at detail medium (docs/models.md).

## Out of scope

- Sole basis for decisions about rights, access, money, work or freedom: it confuses people at the rates stated above,
  and some groups more often than others.
- Surveillance of public places, or search for people without their consent.
- Estimation of age, sex, origin, health or emotions: it was not trained for these.
- Proof of identity: the recognizer cannot tell a person from a picture of that person.
- Emergencies, where no person checks its decisions.

Serve this pack only where its accuracy, data and terms fit your purpose.
"""
CALIBRATED: Final = (
    "Calibration: {data} ({images:,} photos of {people:,} people, {impostor_pairs:,} impostor and {genuine_pairs:,} "
    "genuine pairs)."
)
TABLE: Final = "| Measure | Value |\n|---|---|\n"
CARD_FILE: Final = "MODEL_CARD.md"
NO_DATA_TERMS: Final = (
    "Not stated (`--data-terms`): the terms of the training photos are unknown. Check them before you distribute this "
    "pack."
)
NO_DETECTOR_TERMS: Final = "Not stated: the terms of its training photos are unknown."
CROPS: Final = "{images:,} aligned crops of {people:,} people"
LARGE_SET: Final = 1_000_000
"""Crops from which a recognizer counts as trained on millions."""


def _block(text: str, figures: Mapping[str, Any]) -> str:
    if text.startswith(("|", "`", "#")):
        return fill(text, figures)
    items = [" ".join(fill(item, figures).split()) for item in re.split(r"\n(?=- )", text)]
    return "\n".join(textwrap.fill(item, 120, subsequent_indent="  " * item.startswith("- ")) for item in items if item)


def write_model_card(pack: ModelPack) -> None:
    """Write MODEL_CARD.md from the provenance, calibration and metrics of a pack."""
    figures, sections = _figures(pack), []
    for section in CARD.strip().split("\n\n## "):
        heading, *blocks = section.split("\n\n")
        filled = [_block(block, figures) for block in blocks]
        if filled[0]:
            sections.append("\n\n".join([fill(heading, figures), *filter(None, filled)]))
    (pack.directory / CARD_FILE).write_text("\n\n## ".join(sections) + "\n", encoding="utf-8")


def update_model_card(pack: ModelPack) -> None:
    """Replace the figures and the calibration in the card of a pack, if it has one."""
    path = pack.directory / CARD_FILE
    if not path.is_file():
        return
    card, missing = path.read_text(encoding="utf-8"), ""
    for name, value in pack_rows(pack):
        row = f"| {name} | {value} |\n"
        card, found = re.subn(rf"^\| {re.escape(name)} \|.*\n", row, card, flags=re.MULTILINE)
        missing += "" if found else row
    if pack.calibration is not None:
        calibrated = _block(f"- {_calibrated(pack.calibration)}", {})
        card = re.sub(r"^- Calibration: .*?(?=\n- |\n\n)", calibrated, card, flags=re.MULTILINE | re.DOTALL)
    path.write_text(card.replace(TABLE, TABLE + missing), encoding="utf-8")


def _calibrated(calibration: Mapping[str, Any]) -> str:
    return CALIBRATED.format_map({**calibration, "data": calibration["data"].partition(",")[0]})


def _figures(pack: ModelPack) -> dict[str, Any]:
    """Return everything that CARD names, as far as it is known."""
    recognizer, detector = pack.provenance["recognizer"], pack.provenance.get("detector", {})
    run, data = recognizer["run"], recognizer["data"]
    teacher, photos = run["distill"]["teacher"], detector.get("run", {}).get("photos", {})
    return {
        **pack.metrics,
        "model_id": pack.model_id,
        "display_name": pack.display_name,
        "dimension": pack.recognition.dimension,
        "recognizer": recognizer,
        "detector": detector,
        "run": run,
        "data": data,
        "crops": CROPS.format(**data) if data["images"] else "unknown photos",
        "taught": f"distilled from {teacher}" if teacher else "trained without a teacher",
        "data_terms": data["terms"] or NO_DATA_TERMS,
        "detector_photos": ", ".join(f"{count:,} {kind}" for kind, count in photos.items()),
        "detector_terms": detector.get("terms") or NO_DETECTOR_TERMS,
        "calibrated": _calibrated(pack.calibration or {}),
        "figures": "\n".join(f"| {name} | {value} |" for name, value in pack_rows(pack)),
        "fewer": "recognizers trained on millions are far better" if 0 < data["images"] < LARGE_SET else None,
        "in_teachers": "in its teacher's" if teacher else None,
    }


def pack_rows(pack: ModelPack) -> list[tuple[str, str]]:
    """Return the figures of a pack and the sizes of its files."""
    return metric_rows(pack.metrics) + [
        (task.path.name, f"{megabytes(task.path):.2f} MB") for task in (pack.detection, pack.recognition)
    ]


def megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6
