"""Model card: origin, figures, limits and terms of a pack."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.pack.manifest import ModelPack
from training.config import ConfigError
from training.export.card_commands import commands

CARD = """# {name}

{display_name}: a face detector and a face recognizer ({backbone}, {dimension} dimensions). `kith-train pack` and
`kith-train evaluate --refresh` generate this card from the manifest.

## Training data

{recognizer}
{detector}
- Calibration: {calibrated_on}, {impostor_pairs:,} impostor
  and {genuine_pairs:,} genuine pairs).

**Terms.** A pack is as free as its least free part: networks, training photos, and the photos of teachers and labeling
networks.

**Overlap of people.** The figures below are too good, by an unknown amount, if the training photos or those of a
teacher show people of the photos that measure them. Kith does not check this.

## Commands

```
{commands}
```

{note}## Figures

All figures use the detector and alignment of the pack, as served, without flip averaging. Intervals are 95 %, over
people on LFW and over photos on WIDER.

| Measure | Value |
|---|---|
{rows}

{protocols}

{splits}{groups}{variants}## Limitations

{worst}{limits}
{sizes}- No figure shows how many masked faces and strong profiles the detector misses. Landmarks in upside-down photos
  are not measured: the service tries other orientations at detail medium (docs/detection.md).

## Out of scope

- Sole basis for decisions about rights, access, money, work or freedom: it confuses people at the rates stated above,
  and some groups more often than others.
- Surveillance of public places, or search for people without their consent.
- Estimation of age, sex, origin, health or emotions: it was not trained for these.
- Proof of identity: the recognizer cannot tell a person from a picture of that person.
- Emergencies, where no person checks its decisions.

Serve this pack only where its accuracy, data and terms fit your purpose.
"""
SPLITS = """View 2 by photo properties, at the thresholds of its folds. The worse photo of a pair selects its
third. FNMR is the share of missed same-person pairs, FMR the share of accepted different-person pairs.

| By | Part | Pairs | Accuracy | FNMR | FMR |
|---|---|---|---|---|---|
{rows}

By fold: {folds}.

"""
GROUPS = """## Who is missed, who is confused

At one threshold, the cosine of an FMR of 0.1 % on LFW View 1 ({threshold:.3f}), measured by
`bench.groups` of commit f97300ab on aligned crops. Intervals are 95 %, over people.

{named}
- Misses (FNMR, FNIR) by age, gender, race or skin tone are unknown: FairFace and All-Age-Faces have one photo of each
  person. FairFace labels race, not skin tone.

| Photos | FNMR | FMR |
|---|---|---|
{misses}

| FairFace | FMR, both of the group | Over that of all |
|---|---|---|
{rates}

"""
VARIANTS = """## Precision variants

{source}

| Variant | Loss |
|---|---|
{rows}

"""
QUANTIZED_ON_DATA: Final = (
    "The losses of these variants were measured on LFW and WIDER FACE. The last rows enroll and search the open-set "
    "people of LFW at the fp32 thresholds of the pack."
)
QUANTIZED_ON_PHOTOS: Final = (
    "`kith models quantize` wrote and measured these INT8 files on photos without names{photos}."
)
WORST = """- The worst errors on View 2, by file name (some labels of LFW are wrong):

  | Similarity | Truth | Photos |
  |---|---|---|
{rows}

"""

NO_DATA_TERMS: Final = (
    "Not stated (`--data-terms`): the terms of the training photos are unknown. Check them before you distribute this "
    "pack."
)
NO_DETECTOR_TERMS: Final = "Not stated (`--detector-terms`): the terms of its training photos are unknown."
LARGE_SET: Final = 1_000_000
"""Crops from which a recognizer counts as trained on millions."""
MIN_FOUND_SHARE: Final = 0.9
PLAIN_PHOTOS: Final = "LFW"
MASKED_PHOTOS: Final = "LFW, one photo with a drawn mask"
CHILDREN: Final = ("0-2", "3-9", "2-12")
"""Names of the age groups of bench.groups that are children only."""
CARD_KINDS: Final = ("", "age", "gender", "race")


def check_provenance(pack: ModelPack) -> None:
    """Raise ConfigError if the manifest lacks the provenance that a model card needs."""
    recognizer = pack.provenance.get("recognizer", {})
    if pack.calibration is None or not {"run", "data"} <= set(recognizer):
        raise ConfigError(f"{pack.model_id} has no provenance of its run and data, which a model card needs")


def write_model_card(pack: ModelPack) -> None:
    """Write MODEL_CARD.md from the provenance, calibration and metrics of a pack."""
    calibration = pack.calibration or {}
    run: dict[str, Any] = pack.provenance["recognizer"]["run"]
    data: dict[str, Any] = pack.provenance["recognizer"]["data"]
    recognizer = _fill(f"- Recognizer: {_recognizer_data(pack)}")
    (pack.directory / "MODEL_CARD.md").write_text(
        CARD.format(
            name=pack.model_id,
            display_name=pack.display_name,
            backbone=run["backbone"]["name"],
            dimension=pack.recognition.dimension,
            recognizer=recognizer,
            detector=_fill(f"- Detector: {_detector_data(pack)}"),
            calibrated_on=f"{calibration['data'].partition(',')[0]} ({calibration['images']:,} photos of "
            f"{calibration['people']:,} people",
            impostor_pairs=calibration["impostor_pairs"],
            genuine_pairs=calibration["genuine_pairs"],
            commands="\n".join(commands(pack)),
            note="".join(f"{textwrap.fill(text, 120)}\n\n" for text in _notes(pack)),
            rows="\n".join(f"| {name} | {value} |" for name, value in pack_rows(pack)),
            protocols=textwrap.fill(_protocols(pack.metrics), 120),
            splits=_splits(pack.metrics),
            groups=_groups(pack.metrics),
            variants=_variants(pack),
            worst=_worst(pack.metrics),
            limits=_fill(_data_limits(data["images"], bool(run["distill"]["teacher"]))),
            sizes=_missed_sizes(pack.metrics),
        ),
        encoding="utf-8",
    )


def _fill(item: str) -> str:
    """Return an item of a list, wrapped."""
    return textwrap.fill(item, 118, subsequent_indent="  ")


def variant_rows(pack: ModelPack) -> list[tuple[str, str]]:
    """Return the losses of the variants of a pack, by network, precision and engine."""
    return [
        (f"{task}, {variant.precision}, {engine}", "; ".join(_losses(measured)))
        for task, spec in (("detector", pack.detection), ("recognizer", pack.recognition))
        for variant in spec.variants
        for engine, measured in variant.measured.get("engines", {}).items()
    ]


def _losses(measured: Mapping[str, Any]) -> list[str]:
    losses = []
    if "lfw_view2" in measured:
        view2 = measured["lfw_view2"]
        low, high = view2["interval"]
        losses.append(f"LFW View 2 {view2['points_lost']:+.3f} points lost (95 %: {low:+.2f} to {high:+.2f})")
    if "lfw_view1" in measured:
        losses.append(f"View 1 {measured['lfw_view1']['points_lost']:+.2f}")
    if "wider_val_recall" in measured:
        losses.append(f"WIDER val recall {measured['wider_val_recall']['points_lost']:+.2f}")
    if "landmark_shift" in measured:
        shift = measured["landmark_shift"]
        losses.append(
            f"landmarks move by {shift['pixels']['median']:.2f} px, {shift['eye_distances']['median']:.2%} of "
            f"the eye distance (95th percentile {shift['eye_distances']['p95']:.1%})"
        )
    if "cosine" in measured:
        losses.append(f"cosine to fp32 {measured['cosine']['mean']:.5f}, at worst {measured['cosine']['worst']:.4f}")
    return losses


def _variants(pack: ModelPack) -> str:
    if not (found := variant_rows(pack)):
        return ""
    lines = [f"| {name} | {losses} |" for name, losses in found]
    for variant in pack.recognition.variants:
        for engine, measured in variant.measured.get("engines", {}).items():
            lines += [
                f"| enrolled {name}, {variant.precision} by {engine} | "
                f"TAR {result['tar']:.1%} at FMR {result['fmr']:.3%} ({result['fmr_asked']:.1%} requested); "
                f"FNIR {result['fnir']:.1%} at FPIR {result['fpir']:.2%} "
                f"({result['fpir_asked']:.0%} requested) |"
                for name, result in measured.get("galleries", {}).items()
            ]
    listed = [variant for spec in (pack.detection, pack.recognition) for variant in spec.variants]
    files = ", ".join(
        f"{variant.path.name} {megabytes(variant.path):.2f} MB" for variant in listed if variant.path is not None
    )
    notes = {str(variant.measured["photos"]) for variant in listed if "photos" in variant.measured}
    photos = "".join(f" ({note})" for note in sorted(notes) if note)
    source = QUANTIZED_ON_PHOTOS.format(photos=photos) if notes else QUANTIZED_ON_DATA
    source += f" Losses are against fp32; a negative loss is a chance gain. Files in `int8/`: {files}."
    return VARIANTS.format(source=textwrap.fill(source, 120), rows="\n".join(lines))


def _notes(pack: ModelPack) -> list[str]:
    """Return notes that the commands do not contain, and links."""
    note, log = pack.provenance.get("note"), pack.provenance.get("log")
    return [text for text in (note, f"Experiment log: {log}" if log else None) if text]


def _splits(metrics: Mapping[str, Any]) -> str:
    if "lfw_splits" not in metrics:
        return ""
    lines = []
    for split in metrics["lfw_splits"]:
        fnmr, fmr = ("-" if rate is None else f"{rate:.1%}" for rate in (split["fnmr"], split["fmr"]))
        accuracy = f"{split['accuracy']:.1%}{interval(split['interval'], 1)}"
        lines.append(f"| {split['by']} | {split['part']} | {split['pairs']} | {accuracy} | {fnmr} | {fmr} |")
    folds = ", ".join(f"{accuracy:.1%}" for accuracy in metrics["lfw_view2"]["accuracy"]["folds"])
    return SPLITS.format(rows="\n".join(lines), folds=folds)


def _groups(metrics: Mapping[str, Any]) -> str:
    """Return the section of the figures that `store_group_figures` stored, or an empty text."""
    if "groups" not in metrics:
        return ""
    found = metrics["groups"]
    by_photos = {row["photos"]: row for row in found["misses"]}
    plain, masked = by_photos[PLAIN_PHOTOS], by_photos[MASKED_PHOTOS]
    times = ", ".join(
        f"{row['fmr'][0] / plain['fmr'][0]:.1f} times ({row['group']} years, {row['collection']})"
        for row in found["groups"]
        if row["kind"] == "age" and row["group"] in CHILDREN
    )
    children = f"- **Children** are confused with each other more often than two people of LFW: {times}."
    masks = (
        f"- **Masks** hide people: drawn on one of two photos of a person of LFW, they raise FNMR from "
        f"{plain['fnmr'][0]:.1%} to {masked['fnmr'][0]:.1%}."
    )
    rates = [row for row in found["groups"] if row["collection"] == "FairFace" and row["kind"] in CARD_KINDS]
    return GROUPS.format(
        threshold=found["threshold"],
        named="\n".join(textwrap.fill(text, 120, subsequent_indent="  ") for text in (children, masks)),
        misses="\n".join(f"| {name} | {_rate(row['fnmr'])} | {_rate(row['fmr'])} |" for name, row in by_photos.items()),
        rates="\n".join(f"| {row['group']} | {_rate(row['fmr'])} | {row['ratio'][0]:.2f} |" for row in rates),
    )


def _rate(rate: Sequence[float] | None) -> str:
    return "-" if rate is None else f"{rate[0]:.2%}{interval(rate[1:], 2)}"


def _worst(metrics: Mapping[str, Any]) -> str:
    if "lfw_worst_pairs" not in metrics:
        return ""
    lines = [
        f"  | {similarity:.3f} | {truth} | {Path(first).name}, {Path(second).name} |"
        for kind, truth in (("mated", "same person"), ("non_mated", "different people"))
        for first, second, similarity in metrics["lfw_worst_pairs"][kind]
    ]
    return WORST.format(rows="\n".join(lines))


def _missed_sizes(metrics: Mapping[str, Any]) -> str:
    found = metrics.get("face_sizes_found", {})
    few = ", ".join(f"{size} ({share:.0%})" for size, share in found.items() if share < MIN_FOUND_SHARE)
    text = f"- At 640 pixels the detector finds less than 90 % of faces of these sizes (longer side, px): {few}."
    return f"{textwrap.fill(text, 120, subsequent_indent='  ')}\n" if few else ""


def _recognizer_data(pack: ModelPack) -> str:
    """Return origin and number of training crops of the recognizer, its teacher and terms."""
    provenance: dict[str, Any] = pack.provenance["recognizer"]
    run, data = provenance["run"], provenance["data"]
    unnamed = run["head"]["name"] == "none" and not run["terms"]
    people = "without names" if unnamed else f"of {data['people']:,} people"
    teacher = run["distill"]["teacher"]
    taught = f"distilled from {teacher}" if teacher else "trained without a teacher"
    crops = f"{data['images']:,} aligned 112x112 crops {people} ({run['data']['root']}), {taught}."
    return f"{_origin(provenance)}{crops} {data['terms'] or NO_DATA_TERMS}"


def _detector_data(pack: ModelPack) -> str:
    """Return origin and numbers of training photos of the detector, and their terms."""
    provenance: dict[str, Any] = pack.provenance.get("detector", {})
    counts = provenance.get("run", {}).get("photos", {})
    numbers = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    found = [f"{numbers}."] if numbers else []
    return _origin(provenance) + " ".join([*found, provenance.get("terms") or NO_DETECTOR_TERMS])


def _origin(provenance: Mapping[str, Any]) -> str:
    return f"from the pack {provenance['pack']}: " if "pack" in provenance else ""


def _protocols(metrics: Mapping[str, Any]) -> str:
    """Return how the figures were measured, with the sizes that `evaluate_pack` counted."""
    counts = metrics.get("counts", {})
    open_set, wider = "", ""
    if "gallery" in counts:
        open_set = (
            f"{counts['gallery']:,} people with one photo each, {counts['mated']:,} mated probes, "
            f"{counts['strangers']:,} strangers, "
        )
        wider = f"{counts['wider_photos']:,} validation photos, "
    return (
        "View 2 is LFW's ten-fold protocol: each fold uses the threshold of the other nine. A photo without a detected "
        f"face has similarity 0 to all others. Open set: {open_set}thresholds chosen on the same data. WIDER: {wider}"
        "IoU 0.5. Landmark error: mean distance of five points to YuNet's, in eye distances. Detections upside down, "
        "in noise and in textures are false alarms."
    )


def _data_limits(images: int, taught: bool) -> str:
    fewer = ": recognizers trained on millions are far better" if images < LARGE_SET else ""
    teachers = ", or in its teacher's" if taught else ""
    return (
        f"- The recognizer was trained on {images:,} crops{fewer}. Expect worse results for faces that are rare in the "
        f"training data{teachers}. LFW has no labels of age, sex or skin color, few children and few people over "
        "eighty. The figures on LFW cannot show the difference and do not hold for everyone."
    )


def interval(ends: Sequence[float] | None, digits: int) -> str:
    """Return a 95 % interval in parentheses, or an empty text if there is none."""
    return "" if ends is None else f" (95 %: {ends[0]:.{digits}%} to {ends[1]:.{digits}%})"


@dataclass(frozen=True)
class Measure:
    """Figure of one section of the metrics of a pack. ``show`` raises KeyError if it was not measured."""

    name: str
    section: str
    show: Callable[[Mapping[str, Any]], str]

    def of(self, metrics: Mapping[str, Any]) -> str | None:
        try:
            return self.show(metrics[self.section])
        except KeyError:
            return None


def pack_rows(pack: ModelPack) -> list[tuple[str, str]]:
    """Return the figures of a pack and the sizes of its files."""
    return metric_rows(pack.metrics) + [
        (task.path.name, f"{megabytes(task.path):.2f} MB") for task in (pack.detection, pack.recognition)
    ]


def metric_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of the metrics of `evaluate_pack` or of a manifest."""
    plain = json.loads(json.dumps(metrics))
    return [(measure.name, value) for measure in MEASURES if (value := measure.of(plain)) is not None]


def _interval(section: Mapping[str, Any], key: str, digits: int) -> str:
    return interval(section.get("intervals", {}).get(key), digits)


def _fnir(rate: str) -> Measure:
    return Measure(
        f"LFW open set FNIR at FPIR {float(rate):.1%}",
        "lfw_open_set",
        lambda m: (
            f"{m['fnir'][rate]:.1%} (threshold {m['thresholds'][rate]:.3f})"
            + interval(m.get("fnir_intervals", {}).get(rate), 1)
        ),
    )


def _recall_at(precision: int) -> Measure:
    key = f"at_precision_{precision}"
    return Measure(
        f"WIDER val recall at precision {precision} %",
        "wider_val",
        lambda m: (
            f"{m[f'recall_{key}']:.1%} (score {m[f'score_{key}']:.2f}, {m['faces']} faces)"
            + _interval(m, f"recall_{key}", 1)
        ),
    )


def _alarms(name: str, kind: str, total: str) -> Measure:
    return Measure(f"{name} with a face reported", "false_alarms", lambda m: f"{m[kind]} of {m[total]}")


MEASURES: Final = (
    Measure(
        "LFW View 2 accuracy",
        "lfw_view2",
        lambda m: f"{m['accuracy']['mean']:.2%} ± {m['accuracy']['std']:.2%}{_interval(m, 'accuracy', 2)}",
    ),
    Measure(
        "LFW View 2 TAR at FAR 0.1 %",
        "lfw_view2",
        lambda m: f"{m['tar_at_far_1e3']:.1%}{_interval(m, 'tar_at_far_1e3', 1)}",
    ),
    Measure("LFW View 2 EER", "lfw_view2", lambda m: f"{m['eer']:.2%}{_interval(m, 'eer', 2)}"),
    Measure("LFW View 2 photos without a face", "lfw_view2", lambda m: str(m["photos_without_face"])),
    Measure("LFW View 1 test accuracy (its own best threshold)", "lfw_view1", lambda m: f"{m['accuracy']['mean']:.2%}"),
    Measure("LFW open set rank-1", "lfw_open_set", lambda m: f"{m['rank1']:.1%}{interval(m.get('rank1_interval'), 1)}"),
    *map(_fnir, ("0.1", "0.01", "0.001")),
    Measure(
        "LFW open set FNIR at FPIR 0.1% without five doubtful strangers",
        "lfw_open_set",
        lambda m: f"{m['fnir_without_doubtful']['0.001']:.1%}",
    ),
    Measure("LFW central face found", "lfw_central_faces", lambda m: f"{m['found']:.2%} of {m['photos']}"),
    Measure(
        "LFW median landmark error",
        "lfw_central_faces",
        lambda m: (
            f"{m['median_landmark_error']:.2%} of the eye distance" + interval(m.get("landmark_error_interval"), 2)
        ),
    ),
    Measure(
        "WIDER val recall, faces ≥ 32 px, as served",
        "wider_val",
        lambda m: f"{m['recall']:.1%}{_interval(m, 'recall', 1)} at precision {m['precision']:.1%}",
    ),
    *map(_recall_at, (90, 95)),
    Measure(
        "Faces found at 640 px, by their longer side",
        "face_sizes_found",
        lambda m: ", ".join(f"{size} px {share:.0%}" for size, share in m.items()),
    ),
    _alarms("LFW photos upside down", "upside_down", "upside_down_photos"),
    _alarms("Pictures of noise", "noise", "noise_pictures"),
    _alarms("Textures", "textures", "texture_pictures"),
)


def megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6
