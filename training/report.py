"""The model card: what a pack is, what it was made from, how well it does, and what it must not be used for."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.pack import ModelPack
from training.config import ConfigError

CARD = """# {name}

{display_name}: a compact face detector, and a face recogniser ({backbone}, {dimension} dimensions). This card is
written by `kith-train pack`, and by `kith-train evaluate --refresh`, from what was measured.

## Made from

- Recogniser: {images:,} aligned 112x112 crops of {people:,} people ({data}), {teacher}.
  {terms}
- Detector: 649 training photos of WIDER FACE (boxes by people, landmarks by YuNet) and 450 whole CelebA photos (boxes
  and landmarks by YuNet). Both sets are for non-commercial research.
- Calibration: {calibrated_on}, {impostor_pairs:,} impostor
  and {genuine_pairs:,} genuine pairs). No network has been trained on a photo of LFW.

**Terms: at most non-commercial research**, as those of the data it was learned from.

**People who may be in both.** The figures below are taken on LFW, whose 5,749 people are public figures with their
names. Sets of celebrities share people with it, and CelebA's identities are numbers without names, so that nobody can
take the shared ones out: some of the people it was learned from are surely in LFW too, though none of LFW's photos was
used knowingly. Figures on LFW may therefore be better than on people it has never seen, by an amount that is not known.

## Commands

```
kith-train detector --data DATA --output runs/detector
kith-train detector --data DATA --output runs/detector-polished --polish runs/detector
kith-train run {recipe} --data DATA/{data}{taught} --output runs/{recipe}{settings}
kith-train pack --recogniser runs/{recipe} --detector runs/detector-polished --data DATA \\
    --output models/packs/{name}{packing}
```

{note}## Figures

Everything goes through the pack's own detector and alignment, as served; nothing is flip-averaged. Intervals are 95 %,
over people on LFW and over photos on WIDER.

| Measure | Value |
|---|---|
{rows}

View 2 is LFW's ten-fold protocol, each fold judged by the threshold of the other nine; a photo without a detected face
counts as similar to nobody. Open set: 610 people with one photo each, 4,397 mated probes, 4,069 strangers, thresholds
by hindsight. WIDER: the 74 validation photos at most 576 pixels wide, IoU 0.5. Landmark error: mean over five points
against YuNet's, in eye distances. Upside down, noise, textures: what is reported there is of no use.

{splits}{variants}## Where it fails

{worst}- It was learned from {images:,} crops: recognisers learned from millions are far better. Faces unlike those it
  was learned from (with CelebA: children, the old, people who are not light-skinned) must be expected to do worse. LFW
  says of nobody how old, of what sex or colour they are, and has few children and few people over eighty: it cannot
  show by how much, and the figures above must not be read as if they held for everyone.
{sizes}- The detector misses masked faces and many strong profiles. What it finds upside down has landmarks of no use.
- Its landmarks were learned from YuNet's, which differ from themselves by 5 to 8 % of the eye distance when a photo is
  shifted, mirrored or scaled (`python -m bench.landmark_repeatability`; docs/decisions/0007).

## Not for

- Deciding alone about anybody's rights, access, money, work or freedom: it mistakes people for others, at rates stated
  above, and for some groups surely more often than for others.
- Watching people in public, or looking for people who have not agreed to be looked for.
- Guessing age, sex, origin, health or feelings: it knows nothing of them.
- Proof of identity: it cannot tell a person from a picture of that person.
- Emergencies, and whatever is commercial: its data do not allow it.

Use it to see how Kith works, then serve a pack whose data and terms fit your purpose.
"""
SPLITS = """Split by what LFW lets one split, View 2 at the thresholds of its folds. A pair stands where its worse photo
does, in thirds; FNMR is the share of same-person pairs that are missed, FMR that of strangers taken for one.

| By | Part | Pairs | Accuracy | FNMR | FMR |
|---|---|---|---|---|---|
{rows}

By fold: {folds}.

"""
VARIANTS = """## In other numbers

`kith-train quantise models/packs/{name} --data DATA` writes the INT8 files of `int8/`
({files}), their ranges set by training photos (CelebA; WIDER FACE and scenes), and
measures what they and bf16 lose against fp32
on LFW and WIDER FACE; a loss below zero is a gain by chance. In the lower part LFW's open-set people are enrolled and
searched for at the thresholds of the pack, which are fp32's.

| What | Lost |
|---|---|
{rows}

"""
WORST = """- The pairs of View 2 that it gets most wrong, by LFW's file names (some of LFW's labels are wrong):

  | Similarity | Truth | Photos |
  |---|---|---|
{rows}

"""


FOUND_ENOUGH: Final = 0.9


def check_provenance(pack: ModelPack) -> None:
    """Raises ConfigError where the manifest lacks what a card tells of the pack's origin."""
    told = pack.provenance.get("recogniser", {})
    if pack.calibration is None or not {"run", "data"} <= set(told):
        raise ConfigError(f"{pack.model_id} does not say from which run and data it was made: no card can be written")


def write_model_card(pack: ModelPack, settings: Sequence[str] = ()) -> None:
    """Write MODEL_CARD.md from the pack's own provenance, calibration and metrics; ``settings``: in what its run
    differs from the recipe."""
    calibration = pack.calibration or {}
    run: dict[str, Any] = pack.provenance["recogniser"]["run"]
    data: dict[str, Any] = pack.provenance["recogniser"]["data"]
    teacher = run["distill"]["teacher"]
    (pack.directory / "MODEL_CARD.md").write_text(
        CARD.format(
            name=pack.model_id,
            display_name=pack.display_name,
            recipe=run["name"],
            settings="".join(f" \\\n    --set {setting}" for setting in settings),
            note="".join(f"{textwrap.fill(text, 120)}\n\n" for text in _told(pack)),
            images=data["images"],
            people=data["people"],
            data=run["data"]["root"],
            backbone=run["backbone"]["name"],
            dimension=pack.recognition.dimension,
            teacher=f"taught by {teacher}" if teacher else "from scratch, no teacher",
            packing=f" --centre {centre:g}" if (centre := pack.provenance["recogniser"].get("centre", 0.0)) else "",
            taught=f" --teacher {teacher}" if teacher else "",
            terms=textwrap.fill(data["terms"] or terms_of(run["data"]["root"]), 118, subsequent_indent="  "),
            calibrated_on=f"{calibration['data'].partition(',')[0]} ({calibration['images']:,} photos of "
            f"{calibration['people']:,} people",
            impostor_pairs=calibration["impostor_pairs"],
            genuine_pairs=calibration["genuine_pairs"],
            rows="\n".join(f"| {name} | {value} |" for name, value in rows(pack)),
            splits=_splits(pack.metrics),
            variants=_variants(pack),
            worst=_worst(pack.metrics),
            sizes=_missed_sizes(pack.metrics),
        ),
        encoding="utf-8",
    )


def variant_rows(pack: ModelPack) -> list[tuple[str, str]]:
    """What a pack's variants lose, by network, numbers and runtime."""
    return [
        (f"{task}, {variant.precision}, {engine}", "; ".join(_losses(measured)))
        for task, spec in (("detector", pack.detection), ("recogniser", pack.recognition))
        for variant in spec.variants
        for engine, measured in variant.measured.get("engines", {}).items()
    ]


def _losses(measured: Mapping[str, Any]) -> list[str]:
    view2 = measured["lfw_view2"]
    low, high = view2["interval"]
    told = [f"LFW View 2 {view2['points_lost']:+.3f} points lost (95 %: {low:+.2f} to {high:+.2f})"]
    if "lfw_view1" in measured:
        told.append(f"View 1 {measured['lfw_view1']['points_lost']:+.2f}")
    if "wider_val_recall" in measured:
        told.append(f"WIDER val recall {measured['wider_val_recall']['points_lost']:+.2f}")
        shift = measured["landmark_shift"]
        told.append(
            f"landmarks move by {shift['pixels']['median']:.2f} px, {shift['eye_distances']['median']:.2%} of "
            f"the eye distance (95th percentile {shift['eye_distances']['p95']:.1%})"
        )
    if "cosine" in measured:
        told.append(f"cosine to fp32 {measured['cosine']['mean']:.5f}, at worst {measured['cosine']['worst']:.4f}")
    return told


def _variants(pack: ModelPack) -> str:
    if not (found := variant_rows(pack)):
        return ""
    lines = [f"| {name} | {told} |" for name, told in found]
    for variant in pack.recognition.variants:
        for engine, measured in variant.measured.get("engines", {}).items():
            lines += [
                f"| enrolled {name}, {variant.precision} by {engine} | TAR {felt['tar']:.1%} at FMR {felt['fmr']:.3%} "
                f"({felt['fmr_asked']:.1%} asked); FNIR {felt['fnir']:.1%} at FPIR {felt['fpir']:.2%} "
                f"({felt['fpir_asked']:.0%} asked) |"
                for name, felt in measured["galleries"].items()
            ]
    files = ", ".join(
        f"{variant.path.name} {megabytes(variant.path):.2f} MB"
        for spec in (pack.detection, pack.recognition)
        for variant in spec.variants
        if variant.path is not None
    )
    return VARIANTS.format(name=pack.model_id, rows="\n".join(lines), files=files)


def _told(pack: ModelPack) -> list[str]:
    """What the commands do not tell, and where to read on."""
    note, log = pack.provenance.get("note"), pack.provenance.get("log")
    return [text for text in (note, f"What was tried on the way, and what it gave: {log}" if log else None) if text]


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
    few = [
        f"{size} ({share:.0%})" for size, share in metrics.get("face_sizes_found", {}).items() if share < FOUND_ENOUGH
    ]
    if not few:
        return ""
    return (
        textwrap.fill(
            "- In one pass at 640 pixels the detector finds fewer than nine in ten faces whose longer side has so many "
            f"pixels: {', '.join(few)}.",
            120,
            subsequent_indent="  ",
        )
        + "\n"
    )


def terms_of(data: str) -> str:
    """What a card says of data whose terms nobody stated."""
    if data == "celeba":
        return "CelebA's terms allow non-commercial research only."
    return "The terms of these photos were not stated (`--data-terms`): find them out before you give this pack away."


@dataclass(frozen=True)
class Measure:
    """A figure of a pack's metrics, as a person would read it. ``show`` raises KeyError where it was not measured."""

    name: str
    show: Callable[[Mapping[str, Any]], str]

    def of(self, metrics: Mapping[str, Any]) -> str | None:
        try:
            return self.show(metrics)
        except KeyError:
            return None


def rows(pack: ModelPack) -> list[tuple[str, str]]:
    """The figures of a measured pack and its files' sizes; intervals only where they were measured."""
    return measured(pack.metrics) + [
        (task.path.name, f"{megabytes(task.path):.2f} MB") for task in (pack.detection, pack.recognition)
    ]


def measured(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures of :func:`training.evaluate.evaluate_pack`, straight from it or read from a manifest."""
    plain = json.loads(json.dumps(metrics))
    return [(measure.name, value) for measure in MEASURES if (value := measure.of(plain)) is not None]


def _verification(key: str, digits: int) -> Callable[[Mapping[str, Any]], str]:
    def show(metrics: Mapping[str, Any]) -> str:
        view2 = metrics["lfw_view2"]
        return f"{view2[key]:.{digits}%}{interval(view2.get('intervals', {}).get(key), digits)}"

    return show


def _accuracy(metrics: Mapping[str, Any]) -> str:
    view2 = metrics["lfw_view2"]
    ends = interval(view2.get("intervals", {}).get("accuracy"), 2)
    return f"{view2['accuracy']['mean']:.2%} ± {view2['accuracy']['std']:.2%}{ends}"


def _fnir(rate: str) -> Callable[[Mapping[str, Any]], str]:
    def show(metrics: Mapping[str, Any]) -> str:
        wide = metrics["lfw_open_set"]
        ends = interval(wide.get("fnir_intervals", {}).get(rate), 1)
        return f"{wide['fnir'][rate]:.1%} (threshold {wide['thresholds'][rate]:.3f}){ends}"

    return show


def _rank1(metrics: Mapping[str, Any]) -> str:
    wide = metrics["lfw_open_set"]
    return f"{wide['rank1']:.1%}{interval(wide.get('rank1_interval'), 1)}"


def _wider(metrics: Mapping[str, Any]) -> str:
    found = metrics["wider_val"]
    ends = interval(found.get("intervals", {}).get("recall"), 1)
    return f"{found['recall']:.1%}{ends} at precision {found['precision']:.1%}"


def _wider_at(precision: int) -> Callable[[Mapping[str, Any]], str]:
    key = f"at_precision_{precision}"

    def show(metrics: Mapping[str, Any]) -> str:
        found = metrics["wider_val"]
        ends = interval(found.get("intervals", {}).get(f"recall_{key}"), 1)
        return f"{found[f'recall_{key}']:.1%} (score {found[f'score_{key}']:.2f}, {found['faces']} faces){ends}"

    return show


def _landmarks(metrics: Mapping[str, Any]) -> str:
    central = metrics["lfw_central_faces"]
    ends = interval(central.get("landmark_error_interval"), 2)
    return f"{central['median_landmark_error']:.2%} of the eye distance{ends}"


def _sizes(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{size} px {share:.0%}" for size, share in metrics["face_sizes_found"].items())


def _alarms(kind: str, of: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda metrics: f"{metrics['false_alarms'][kind]} of {metrics['false_alarms'][of]}"


MEASURES: Final = (
    Measure("LFW View 2 accuracy", _accuracy),
    Measure("LFW View 2 TAR at FAR 0.1 %", _verification("tar_at_far_1e3", 1)),
    Measure("LFW View 2 EER", _verification("eer", 2)),
    Measure("LFW View 2 photos without a face", lambda m: str(m["lfw_view2"]["photos_without_face"])),
    Measure("LFW View 1 test accuracy (its own best threshold)", lambda m: f"{m['lfw_view1']['accuracy']['mean']:.2%}"),
    Measure("LFW open set rank-1", _rank1),
    *(Measure(f"LFW open set FNIR at FPIR {float(rate):.1%}", _fnir(rate)) for rate in ("0.1", "0.01", "0.001")),
    Measure(
        "LFW open set FNIR at FPIR 0.1% without five doubtful strangers",
        lambda m: f"{m['lfw_open_set']['fnir_without_doubtful']['0.001']:.1%}",
    ),
    Measure(
        "LFW central face found",
        lambda m: f"{m['lfw_central_faces']['found']:.2%} of {m['lfw_central_faces']['photos']}",
    ),
    Measure("LFW median landmark error", _landmarks),
    Measure("WIDER val recall, faces ≥ 32 px, as served", _wider),
    Measure("WIDER val recall at precision 90 %", _wider_at(90)),
    Measure("WIDER val recall at precision 95 %", _wider_at(95)),
    Measure("Faces found at 640 px, by their longer side", _sizes),
    Measure("LFW photos upside down with a face reported", _alarms("upside_down", "upside_down_photos")),
    Measure("Pictures of noise with a face reported", _alarms("noise", "noise_pictures")),
    Measure("Textures with a face reported", _alarms("textures", "texture_pictures")),
)


def interval(ends: Sequence[float] | None, digits: int) -> str:
    """What stands behind a figure: its 95 % interval, or nothing where none was measured."""
    return "" if ends is None else f" (95 %: {ends[0]:.{digits}%} to {ends[1]:.{digits}%})"


def megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6
