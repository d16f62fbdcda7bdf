"""Model card of a pack: a text whose figures are filled in from its manifest and calibration.

Braces name a figure. Whatever names a figure that nobody measured is left out: a part in [[double brackets]], a row, an
item of a list, a block between blank lines, and with its first block a section. A card that is written may be edited:
later measurements replace the figures in it, and nothing else.
"""

from __future__ import annotations

import json
import re
import string
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from models.pack.manifest import ModelPack

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
INTERVAL: Final = "[[ (95 %: {{{0}[0]:.{1}%}} to {{{0}[1]:.{1}%}})]]"


def _with_interval(value: str, interval: str, digits: int) -> str:
    return value + INTERVAL.format(interval, digits)


MEASURES: Final[Mapping[str, str]] = {
    "LFW View 2 accuracy": _with_interval(
        "{lfw_view2[accuracy][mean]:.2%} ± {lfw_view2[accuracy][std]:.2%}", "lfw_view2[intervals][accuracy]", 2
    ),
    "LFW View 2 TAR at FAR 0.1 %": _with_interval(
        "{lfw_view2[tar_at_far_1e3]:.1%}", "lfw_view2[intervals][tar_at_far_1e3]", 1
    ),
    "LFW View 2 EER": _with_interval("{lfw_view2[eer]:.2%}", "lfw_view2[intervals][eer]", 2),
    "LFW View 2 photos without a face": "{lfw_view2[photos_without_face]}",
    "LFW View 1 test accuracy (its own best threshold)": "{lfw_view1[accuracy][mean]:.2%}",
    "LFW open set rank-1": _with_interval("{lfw_open_set[rank1]:.1%}", "lfw_open_set[rank1_interval]", 1),
    **{
        f"LFW open set FNIR at FPIR {float(rate):.1%}": _with_interval(
            f"{{lfw_open_set[fnir][{rate}]:.1%}} (threshold {{lfw_open_set[thresholds][{rate}]:.3f}})",
            f"lfw_open_set[fnir_intervals][{rate}]",
            1,
        )
        for rate in ("0.1", "0.01", "0.001")
    },
    "LFW open set FNIR at FPIR 0.1% without five doubtful strangers": (
        "{lfw_open_set[fnir_without_doubtful][0.001]:.1%}"
    ),
    "LFW central face found": "{lfw_central_faces[found]:.2%} of {lfw_central_faces[photos]}",
    "LFW median landmark error": _with_interval(
        "{lfw_central_faces[median_landmark_error]:.2%} of the eye distance",
        "lfw_central_faces[landmark_error_interval]",
        2,
    ),
    "WIDER val recall, faces ≥ 32 px, as served": _with_interval(
        "{wider_val[recall]:.1%}", "wider_val[intervals][recall]", 1
    )
    + " at precision {wider_val[precision]:.1%}",
    **{
        f"WIDER val recall at precision {precision} %": _with_interval(
            f"{{wider_val[recall_at_precision_{precision}]:.1%}} "
            f"(score {{wider_val[score_at_precision_{precision}]:.2f}}, {{wider_val[faces]}} faces)",
            f"wider_val[intervals][recall_at_precision_{precision}]",
            1,
        )
        for precision in (90, 95)
    },
}
"""Text of each figure of the metrics of `evaluate_pack`, by its name."""
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


class _Figures(string.Formatter):
    """Fills in figures. An empty one counts as missing."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, used = super().get_field(field_name, args, kwargs)
        if value is None or value == "":
            raise KeyError(field_name)
        return value, used


def fill(text: str, figures: Mapping[str, Any]) -> str:
    """Return the text with its figures, or an empty text if one outside of double brackets is missing."""
    filled = []
    for i, part in enumerate(re.split(r"\[\[(.*?)\]\](?!\])", text, flags=re.DOTALL)):
        try:
            filled.append(_Figures().vformat(part, (), figures))
        except (KeyError, IndexError, TypeError):
            if i % 2 == 0:
                return ""
    return "".join(filled)


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


def metric_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of the metrics of `evaluate_pack` or of a manifest."""
    plain = json.loads(json.dumps(metrics))
    filled = {name: fill(text, plain) for name, text in MEASURES.items()}
    return [(name, value) for name, value in filled.items() if value]


def megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6
