"""The model card: what a pack is, what it was made from, how well it does, and what it must not be used for."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.pack import ModelPack

CARD = """# {name}

{display_name}: a compact face detector, and a face recogniser ({backbone}, {dimension} dimensions). This card is
written by `kith-train pack` from the measurements of that run.

## Made from

- Recogniser: {images:,} aligned 112x112 crops of {people:,} people ({data}), {teacher}.
  {terms}
- Detector: 649 training photos of WIDER FACE (boxes by people, landmarks by YuNet) and 450 whole CelebA photos (boxes
  and landmarks by YuNet). Both sets are for non-commercial research.
- Calibration: LFW View 1 ({calibration_images:,} photos of {calibration_people:,} people, {impostor_pairs:,} impostor
  and {genuine_pairs:,} genuine pairs). No network has been trained on a photo of LFW.
- Sets of celebrities share people: some that it was learned from are surely in LFW too. Figures on LFW may be a little
  better for it than on strangers to both.

**Terms: at most non-commercial research**, as those of the data it was learned from.

## Commands

```
kith-train detector --data DATA --output runs/detector
kith-train detector --data DATA --output runs/detector-polished --polish runs/detector
kith-train run {recipe} --data DATA/{data} --output runs/{recipe}
kith-train pack --recogniser runs/{recipe} --detector runs/detector-polished --data DATA \\
    --output models/packs/{name}
```

{note}## Figures

Everything goes through the pack's own detector and alignment, as served; nothing is flip-averaged.

| Measure | Value |
|---|---|
{rows}

View 2 is LFW's ten-fold protocol, each fold judged by the threshold of the other nine; a photo without a detected face
counts as similar to nobody. Open set: 610 people with one photo each, 4,397 mated probes, 4,069 strangers, thresholds
by hindsight. WIDER: the 74 validation photos at most 576 pixels wide, IoU 0.5. Landmark error: mean over five points
against YuNet's, in eye distances.

## Where it fails

- It was learned from {images:,} crops: recognisers learned from millions are far better. Faces unlike those it was
  learned from (with CelebA: children, the old, people who are not light-skinned) must be expected to do worse; LFW
  cannot show by how much.
- The detector misses faces under about 16 pixels, upside-down and masked faces, and many strong profiles.
- Its landmarks were learned from YuNet's, which differ from themselves by 5 to 8 % of the eye distance when a photo is
  shifted, mirrored or scaled (`python -m bench.landmark_repeatability`; docs/decisions/0007).

## Not for

Deciding alone about anybody's rights, access or freedom; surveillance; emergencies; commercial use. Use it to see how
Kith works, then serve a pack whose data and terms fit your purpose.
"""


def write_model_card(pack: ModelPack, note: str = "") -> None:
    """Write MODEL_CARD.md from the pack's own provenance, calibration and metrics; ``note`` tells what the commands
    do not."""
    calibration = pack.calibration or {}
    run: dict[str, Any] = pack.provenance["recogniser"]["run"]
    data: dict[str, Any] = pack.provenance["recogniser"]["data"]
    teacher = run["distill"]["teacher"]
    (pack.directory / "MODEL_CARD.md").write_text(
        CARD.format(
            name=pack.model_id,
            display_name=pack.display_name,
            recipe=run["name"],
            note=f"{textwrap.fill(note, 120)}\n\n" if note else "",
            images=data["images"],
            people=data["people"],
            data=run["data"]["root"],
            backbone=run["backbone"]["name"],
            dimension=pack.recognition.dimension,
            teacher=f"taught by {teacher}" if teacher else "from scratch, no teacher",
            terms=textwrap.fill(data["terms"] or terms_of(run["data"]["root"]), 118, subsequent_indent="  "),
            calibration_images=calibration["images"],
            calibration_people=calibration["people"],
            impostor_pairs=calibration["impostor_pairs"],
            genuine_pairs=calibration["genuine_pairs"],
            rows="\n".join(f"| {name} | {value} |" for name, value in rows(pack)),
        ),
        encoding="utf-8",
    )


def terms_of(data: str) -> str:
    """What a card says of data whose terms nobody stated."""
    if data == "celeba":
        return "CelebA's terms allow non-commercial research only."
    return "The terms of these photos were not stated (`--data-terms`): find them out before you give this pack away."


def rows(pack: ModelPack) -> list[tuple[str, str]]:
    """The figures of a measured pack, as a person would read them; intervals only where they were measured."""
    m = pack.metrics
    view1, view2, wide, central, found = (
        m[k] for k in ("lfw_view1", "lfw_view2", "lfw_open_set", "lfw_central_faces", "wider_val")
    )
    intervals = view2.get("intervals", {})
    return [
        (
            "LFW View 2 accuracy",
            f"{view2['accuracy']['mean']:.2%} ± {view2['accuracy']['std']:.2%}{interval(intervals.get('accuracy'), 2)}",
        ),
        (
            "LFW View 2 TAR at FAR 0.1 %",
            f"{view2['tar_at_far_1e3']:.1%}{interval(intervals.get('tar_at_far_1e3'), 1)}",
        ),
        ("LFW View 2 EER", f"{view2['eer']:.2%}{interval(intervals.get('eer'), 2)}"),
        ("LFW View 2 photos without a face", str(view2["photos_without_face"])),
        ("LFW View 1 test accuracy (its own best threshold)", f"{view1['accuracy']['mean']:.2%}"),
        ("LFW open set rank-1", f"{wide['rank1']:.1%}{interval(wide.get('rank1_interval'), 1)}"),
        *(
            (
                f"LFW open set FNIR at FPIR {float(rate):.1%}",
                f"{fnir:.1%} (threshold {wide['thresholds'][rate]:.3f})"
                f"{interval(wide.get('fnir_intervals', {}).get(rate), 1)}",
            )
            for rate, fnir in wide["fnir"].items()
        ),
        *(
            (f"LFW open set FNIR at FPIR {float(rate):.1%} without five doubtful strangers", f"{fnir:.1%}")
            for rate, fnir in wide.get("fnir_without_doubtful", {}).items()
            if float(rate) <= 1e-3
        ),
        ("LFW central face found", f"{central['found']:.2%} of {central['photos']}"),
        ("LFW median landmark error", f"{central['median_landmark_error']:.2%} of the eye distance"),
        ("WIDER val recall, faces ≥ 32 px, as served", f"{found['recall']:.1%} at precision {found['precision']:.1%}"),
        (
            "WIDER val recall at precision 90 %",
            f"{found['recall_at_precision_90']:.1%} "
            f"(score {found['score_at_precision_90']:.2f}, {found['faces']} faces)",
        ),
    ] + [(f"{task.path.name}", f"{_megabytes(task.path):.2f} MB") for task in (pack.detection, pack.recognition)]


def interval(ends: Sequence[float] | None, digits: int) -> str:
    """What stands behind a figure: its 95 % interval, or nothing where none was measured."""
    return "" if ends is None else f" (95 %: {ends[0]:.{digits}%} to {ends[1]:.{digits}%})"


def _megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6
