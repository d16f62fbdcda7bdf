"""Training runs, top to bottom: a recogniser, a detector, and the pack that joins them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.alignment import STANDARD, Alignment, align, recut
from models.detection import Canvas, Detector, lay_out
from models.errors import PackError
from models.network import Float
from models.pack import (
    DetectionSpec,
    ModelPack,
    Normalisation,
    load_pack,
    replace_calibration,
    sha256_of,
    update_manifest,
    write_pack,
)
from models.recognition import Recogniser, unit
from models.runtime import OnnxNetwork
from training import distributed, plots
from training.backbones import build_backbone
from training.benchmarks import (
    Embed,
    LfwCrops,
    judge,
    judge_bin,
    judge_distractors,
    judge_ijb,
    load_lfw_crops,
)
from training.calibrate import calibrate
from training.compare import Cells, judged, markdown, own_angle_rows, own_angles, remember, remembered, write_table
from training.config import ConfigError, DataConfig, RunConfig
from training.data.identities import list_identities, load_identities, read_rgb
from training.data.verification import read_bin
from training.detection.data import load_annotated
from training.detection.fit import DETECTOR_CHECKPOINT, DetectorLoopConfig, fit_detector
from training.detection.network import FaceDetector
from training.evaluate import PARTS, Embedder, Part, evaluate_pack, read_pairs
from training.export import Centred, Precision, export_detector, export_int8, export_recogniser
from training.html_report import SAMPLE_CROPS, gather, headline_rows, write_report
from training.loop import Checkpoint, Judge, fit, to_tensor
from training.losses import build_head
from training.objective import build_objective, check_objective
from training.recipes import RECIPES, compared
from training.report import check_provenance, write_model_card
from training.runs import (
    CHECKPOINT,
    CONFIG,
    LOSSES,
    averaged_weights,
    load_checkpoint,
    read_json,
    read_run,
    record_config,
)
from training.variants import quantise_pack

Crops = NDArray[np.uint8]
PARITY_IMAGES = 32
INT8_CALIBRATION_IMAGES = 256
MEAN_IMAGES = 2000
VIEW1: tuple[Part, ...] = ("view1",)
DETECTOR_PARITY_SIDE_PX = 384


def train_recogniser(config: RunConfig, detector: Detector | None = None) -> Checkpoint:
    """Learn (or resume) a recogniser; ``detector`` is needed only for photos that are not aligned crops."""
    check_objective(config)
    torch.manual_seed(config.loop.seed)
    if distributed.rank() == 0:
        record_config(config.output, config.as_dict(), config.output / CHECKPOINT, free=("epochs", "root", "output"))
        # Decoded once; the other ranks wait for the cache.
        load_identities(config.data, config.output.parent / "cache", detector)
    distributed.barrier()
    data = load_identities(config.data, config.output.parent / "cache", detector)
    backbone = build_backbone(config.backbone)
    objective = build_objective(config, data.num_classes)
    judge = judge_of(config.validation) if distributed.rank() == 0 else None
    checkpoint = fit(backbone, objective, data, config, judge)
    if distributed.rank() == 0:
        (config.output / "losses.png").write_bytes(plots.png(plots.loss_curves(config.output / LOSSES)))
    return checkpoint


def compare(losses: Sequence[str], data: Path, output: Path, detection: DetectionSpec, epochs: int, people: int) -> str:
    """Run the papers' losses one after the other (those judged before are not run again) and judge each on LFW,
    aligned by this detector; the table grows in ``output`` run by run and is returned."""
    crops = load_lfw_crops(data / "lfw", detection, output / "cache", ("view1", "view2"))
    detector = sha256_of(detection.path)
    rows: list[Cells] = []
    for loss in losses:
        config = compared(loss, data / "celeba", output / loss, epochs, people)
        row = remembered(config, detector)
        if row is None:
            finished = train_recogniser(config)
            row = judged(config, embedder(finished.backbone), finished.head.class_weights(), crops)
            remember(config, detector, row)
        rows.append(row)
        write_table(rows, output)
    return markdown(rows)


def judge_of(validation: Sequence[Path]) -> Judge | None:
    """Ten-fold accuracy on each .bin set, by its name."""
    if not validation:
        return None
    sets = {path.stem: read_bin(path) for path in validation}

    def judge(network: nn.Module) -> dict[str, float]:
        return {f"{name} accuracy": judge_bin(embedder(network), pairs).accuracy.mean for name, pairs in sets.items()}

    return judge


def embedder(network: nn.Module) -> Callable[[Crops], Float]:
    """A torch network as a function from (n, 112, 112, 3) uint8 crops to (n, d) unit vectors."""

    @torch.no_grad()
    def embed(crops: Crops) -> Float:
        device = next(network.parameters()).device
        parts = [
            network(to_tensor(crops[i : i + 128], device)).float().cpu().numpy() for i in range(0, len(crops), 128)
        ]
        return unit(np.concatenate(parts))

    return embed


def embed_of(what: Path) -> tuple[Embed, Alignment]:
    """The embedder of a run, or of a pack, and how its crops are cut."""
    if (what / CONFIG).is_file():
        return embedder(load_run(what)[1]), STANDARD
    spec = load_pack(what).recognition
    return Recogniser(OnnxNetwork(spec.path), spec).embed, spec.alignment


def train_detector(data: Path, output: Path, loop: DetectorLoopConfig, start_from: Path | None = None) -> FaceDetector:
    """Learn (or resume) the detector from ``data``/wider's training photos and ``data``/scenes; ``start_from`` is an
    earlier run whose averaged weights are the beginning."""
    torch.manual_seed(loop.seed)
    record_config(output, asdict(loop), output / DETECTOR_CHECKPOINT, free=("steps",))
    model = FaceDetector()
    if start_from is not None:
        model.load_state_dict(averaged_weights(start_from / DETECTOR_CHECKPOINT))
    photos = load_annotated(data / "wider", "train") + load_annotated(data / "scenes")
    return fit_detector(model, photos, loop, output)


def load_run(output: Path) -> tuple[RunConfig, nn.Module]:
    """A run's settings and its averaged network, in evaluation mode.

    Raises:
        ConfigError: the run has no checkpoint.
    """
    config = read_run(output)
    backbone = build_backbone(config.backbone)
    backbone.load_state_dict(averaged_weights(output / CHECKPOINT))
    return config, backbone.eval().to(distributed.device())


def export_run(run: Path, output: Path, precision: Precision, lfw: Path | None, detection: DetectionSpec) -> float:
    """Write a run's network as ONNX and return its worst cosine to torch's, on the run's own crops.

    Raises:
        ConfigError: int8 without ``lfw``, on whose View 1 it is judged.
        ParityError: onnxruntime disagrees with torch, or int8 loses too much accuracy; nothing is written.
    """
    config, backbone = load_run(run)
    crops = load_identities(config.data, config.output.parent / "cache").crops_NHWC
    output.parent.mkdir(parents=True, exist_ok=True)
    benchmark = None
    if precision == "int8":
        if lfw is None:
            raise ConfigError("int8 is judged on LFW View 1: name the data with --data")
        benchmark = load_lfw_crops(lfw, detection, run.parent / "cache", VIEW1)
    return _write_recogniser(config, backbone, _spread(crops, PARITY_IMAGES), output, precision, benchmark)


def _write_recogniser(
    config: RunConfig, backbone: nn.Module, crops: Crops, output: Path, precision: Precision, view1: LfwCrops | None
) -> float:
    metadata = {
        "kith.run": config.name,
        "kith.input": "RGB, 112x112, (x - 127.5) / 127.5",
        "kith.embedding": f"{config.backbone.embedding_dim}, not normalised",
    }
    if precision != "int8" or view1 is None:
        return export_recogniser(
            backbone, to_tensor(crops), output, metadata, "fp32" if precision == "fp32" else "fp16"
        )
    calibration = load_identities(config.data, config.output.parent / "cache").crops_NHWC
    return export_int8(
        backbone,
        to_tensor(crops),
        to_tensor(_spread(calibration, INT8_CALIBRATION_IMAGES)),
        output,
        metadata,
        lambda embed: _view1_accuracy(embed, view1),
    )


def _view1_accuracy(embed: Embed, crops: LfwCrops) -> float:
    view1 = judge(embed, crops).view1
    assert view1 is not None  # noqa: S101  # these crops are View 1's
    return view1.best_accuracy


def _spread(crops: Crops, count: int) -> Crops:
    """At most ``count`` crops, evenly from all people."""
    return np.asarray(crops[np.unique(np.linspace(0, len(crops) - 1, count).astype(int))])


def report_run(
    run: Path, data: Path, detection: DetectionSpec, report: Path | None, flip: bool = False, view1: bool = False
) -> list[tuple[str, str]]:
    """Judge a run on LFW (``data``/lfw, aligned by this detector) and return its figures; write them, with curves,
    worst pairs and sample crops, as HTML."""
    config, backbone = load_run(run)
    parts = VIEW1 if view1 else PARTS
    crops = load_lfw_crops(data / "lfw", detection, run.parent / "cache", parts)
    evidence = gather(embedder(backbone), crops, flip)
    trained_on = load_identities(config.data, config.output.parent / "cache")
    head = build_head(config.head, config.backbone.embedding_dim, trained_on.num_classes)
    head.load_whole_state(load_checkpoint(run / CHECKPOINT)["head"])
    own = own_angles(embedder(backbone), trained_on, head.class_weights())
    about = [("Head", _described(config)), *own_angle_rows(own)]
    if report is not None:
        samples = _spread(trained_on.crops_NHWC, SAMPLE_CROPS)
        write_report(report, f"Run {config.name}", about, run / LOSSES, evidence, samples)
    return [*about, *((name, value) for name, value, _ in headline_rows(evidence.judgement))]


def judge_others(
    embed: Embed,
    alignment: Alignment,
    detector: Detector,
    cache: Path,
    bins: Sequence[Path] = (),
    ijb: Path | None = None,
    probes: Path | None = None,
    distractors: Path | None = None,
) -> list[tuple[str, str]]:
    """Figures of the benchmarks that were named: .bin sets, an IJB folder, MegaFace's probes (a folder of photos per
    person) among distractors (another)."""

    def embed_standard(crops: Crops) -> Float:
        return embed(recut(crops, alignment))

    rows = []
    for path in bins:
        found = judge_bin(embed_standard, read_bin(path))
        rows.append((f"{path.stem} accuracy", f"{found.accuracy.mean:.2%} ± {found.accuracy.std:.2%}"))
        rows.append((f"{path.stem} TAR at FAR 0.1 %", f"{found.tar_at_far_1e3:.1%}"))
    if ijb is not None:
        templates = judge_ijb(embed, detector, ijb, alignment)
        rows += [(f"{ijb.name} TAR at FAR {far:g}", f"{tar:.2%}") for far, tar in templates.tar_at_far.items()]
        rows.append((f"{ijb.name} photos without a face", str(templates.photos_without_face)))
    if probes is not None and distractors is not None:
        looked_for, others = (
            load_identities(DataConfig(root, None, aligned=False, min_images=1), cache, detector)
            for root in (probes, distractors)
        )
        distraction = judge_distractors(embed_standard, looked_for, others.crops_NHWC)
        rows += [(f"Rank-1 among {size:,} distractors", f"{share:.2%}") for size, share in distraction.rank1.items()]
        rows += [(f"TAR at FAR {far:g} among distractors", f"{tar:.2%}") for far, tar in distraction.tar_at_far.items()]
    return rows


def _described(config: RunConfig) -> str:
    options = ", ".join(f"{k}={v}" for k, v in config.head.options.items())
    terms = "".join(f" + {t.weight:g} {t.name}" for t in config.terms)
    return f"{config.head.name}{f' ({options})' if options else ''}{terms}"


def make_pack(
    recogniser: Path,
    detector: Path | ModelPack,
    data: Path,
    output: Path,
    name: str,
    display_name: str,
    note: str = "",
    terms: str | None = None,
    precision: Precision = "fp16",
    log: str | None = None,
    centre: float = 0.0,
) -> ModelPack:
    """Export finished runs, calibrate on LFW View 1, measure, and write the pack with its card.

    Args:
        detector: a finished detector run, or a pack whose detector is taken over.
        terms: of the recogniser's data, for the card.
        log: for the card, where it is told what was tried.
        centre: how much of the mean embedding of the run's crops is taken off every embedding, in [0, 1].

    Raises:
        ConfigError: a run is unfinished or absent.
        ParityError: onnxruntime disagrees with torch; the pack is not written.
    """
    output.mkdir(parents=True, exist_ok=True)
    config, backbone = load_run(recogniser)
    if centre:
        backbone = Centred(backbone, centre * _mean_embedding(config, backbone)).eval()
    detector_file, recogniser_file = output / "detector.onnx", output / "recogniser.onnx"
    normalisation = Normalisation(127.5, 128.0)
    if isinstance(detector, ModelPack):
        if (detector.detection.head, detector.detection.normalisation) != ("scrfd", normalisation):
            raise ConfigError(f"the detector of {detector.model_id} is of another kind; name a detector run")
        shutil.copyfile(detector.detection.path, detector_file)
        detector_provenance = detector.provenance.get("detector", {"pack": detector.model_id})
    else:
        detector_provenance = _export_detector(detector, data, detector_file, name, normalisation)

    spec = DetectionSpec(detector_file, None, normalisation, "scrfd", "insightface-scrfd-1")
    finder = Detector(OnnxNetwork(detector_file), spec)
    view1 = load_lfw_crops(data / "lfw", spec, recogniser.parent / "cache", VIEW1) if precision == "int8" else None
    cosine = _write_recogniser(config, backbone, _lfw_crops(finder, data / "lfw"), recogniser_file, precision, view1)

    provenance: dict[str, Any] = {
        "recogniser": {
            "run": config.shareable(),
            "data": _counted(config, terms),
            "precision": precision,
            "centre": centre,
            "parity_worst_cosine": cosine,
        },
        "detector": detector_provenance,
        "note": note,
        "log": log,
    }
    dimension = config.backbone.embedding_dim
    draft = write_pack(output, name, display_name, detector_file, recogniser_file, dimension, {}, provenance, {})
    cache = recogniser.parent / "cache"
    evidence = _calibration(draft, data / "lfw", cache)
    metrics = evaluate_pack(draft, data, cache_dir=cache)
    pack = write_pack(
        output, name, display_name, detector_file, recogniser_file, dimension, evidence, provenance, metrics
    )
    write_model_card(pack, departures(provenance["recogniser"]["run"]))
    return pack


def refresh_pack(
    directory: Path, data: Path, cache_dir: Path, note: str | None = None, log: str | None = None
) -> ModelPack:
    """Measure a pack whose networks are there, and write its figures and its card anew; ``note`` and ``log`` replace
    those of the card where they are given.

    Raises:
        PackError: the pack has no manifest version 2.
        ConfigError: the manifest does not tell from which run and data the pack came.
    """
    pack = load_pack(directory)
    check_provenance(pack)
    said = {key: value for key, value in (("note", note), ("log", log)) if value is not None}
    metrics = evaluate_pack(pack, data, cache_dir=cache_dir)
    measured = update_manifest(pack.directory, {**pack.provenance, **said}, metrics)
    write_model_card(measured, departures(pack.provenance["recogniser"]["run"]))
    return measured


def write_variants(directory: Path, data: Path, cache_dir: Path) -> ModelPack:
    """:func:`training.variants.quantise_pack`, and the pack's card anew if it has one."""
    pack = quantise_pack(directory, data, cache_dir)
    if (pack.directory / "MODEL_CARD.md").is_file():
        check_provenance(pack)
        write_model_card(pack, departures(pack.provenance["recogniser"]["run"]))
    return pack


def calibrate_pack(
    directory: Path, data: DataConfig, max_photos_per_person: int | None = None, note: str = ""
) -> ModelPack:
    """Give a pack, or an unversioned directory of ONNX files, thresholds at a risk: its own networks on somebody's own
    people, everybody against everybody.

    Args:
        max_photos_per_person: of people with more, so many are taken, evenly from all.
        note: what these photos are, for the record.

    Raises:
        PackError: there is no pack, or it cannot be written to.
        ConfigError: no people, an unreadable photo, or too few pairs; the pack is as it was.
    """
    pack = load_pack(directory)
    if not os.access(pack.directory, os.W_OK):
        raise PackError("calibration", f"cannot be written into {pack.directory}: copy the pack and calibrate the copy")
    listed = list_identities(data)
    rows = at_most(max_photos_per_person, listed.labels)
    vectors, found = Embedder(pack).embed_people(listed, rows, data.aligned)
    try:
        # The folder's name and never its path, which may tell of people and machines.
        evidence = calibrate(vectors[found], listed.labels[rows[found]].tolist(), data.root.resolve().name)
    except ValueError as error:
        raise ConfigError(f"{data.root}: {error}; {int((~found).sum())} photos show no face") from error
    about = {"note": note, "photos_without_face": int((~found).sum()), "recogniser": pack.recognition.fingerprint()}
    return replace_calibration(pack, {**evidence, **about})


def at_most(count: int | None, labels: NDArray[np.int64]) -> NDArray[np.intp]:
    """Rows of (n,) labels: of each label all, or ``count`` evenly from the first to the last."""
    of_each = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    if count is not None:
        of_each = [rows[np.unique(np.linspace(0, len(rows) - 1, count).astype(int))] for rows in of_each]
    return np.sort(np.concatenate(of_each))


def departures(run: Mapping[str, Any]) -> list[str]:
    """What ``--set`` must say for the recipe to give a run, as a pack tells of it: ``section.key=value``."""
    name = run["name"]
    if name not in RECIPES:
        return []
    # Any folder will do for the data and the teacher, which the command names by itself.
    teacher = run["distill"]["teacher"]
    recipe = RECIPES[name](Path(), Path(name), Path() if teacher else None)
    plain = {**_flat(recipe.shareable()), "data.root": run["data"]["root"], "distill.teacher": teacher}
    changed = {key: value for key, value in _flat(run).items() if plain.get(key) != value}
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changed.items()]


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            # A head's and a term's options are set as if they were its own keys.
            found |= _flat(value, prefix if key == "options" else f"{prefix}{key}.")
        elif key == "terms":
            for term in value:
                found[f"terms.{term['name']}"] = term["weight"]
                found |= _flat(term["options"], f"terms.{term['name']}.")
        elif key == "validation":
            found[key] = ",".join(value)
        else:
            found[f"{prefix}{key}"] = value
    return found


def measure_pack(pack: ModelPack, data: Path, cache_dir: Path | None = None) -> dict[str, Any]:
    """What a pack that somebody else made lacks: the evidence for its thresholds, and its figures, with what they were
    measured on: JSON-ready. What its networks answer is kept in ``cache_dir``."""
    return {
        "detector_sha256": sha256_of(pack.detection.path),
        "recogniser": pack.recognition.fingerprint(),
        "calibration": _calibration(pack, data / "lfw", cache_dir),
        "metrics": evaluate_pack(pack, data, cache_dir=cache_dir),
    }


@torch.no_grad()
def _mean_embedding(config: RunConfig, backbone: nn.Module) -> Tensor:
    """(D,) mean over crops of all people, as they are, before normalisation."""
    crops = to_tensor(_spread(load_identities(config.data, config.output.parent / "cache").crops_NHWC, MEAN_IMAGES))
    return torch.cat([backbone(crops[i : i + 128]).float() for i in range(0, len(crops), 128)]).mean(0)


def _export_detector(run: Path, data: Path, path: Path, name: str, normalisation: Normalisation) -> dict[str, Any]:
    model = FaceDetector()
    model.load_state_dict(averaged_weights(run / DETECTOR_CHECKPOINT))
    photos = load_annotated(data / "wider", "val")[:4]
    side = DETECTOR_PARITY_SIDE_PX
    canvas = Canvas(side, side, 1.0)
    batch = np.stack([lay_out(photo.image[:side, :side], canvas, normalisation) for photo in photos])
    shift = export_detector(model, torch.from_numpy(batch), path, {"kith.run": name})
    return {"run": read_json(run / CONFIG), "parity_worst_shift_strides": shift}


def _counted(config: RunConfig, terms: str | None) -> dict[str, Any]:
    listed = list_identities(config.data)
    return {"images": len(listed), "people": len(listed.names), "terms": terms}


def _calibration(pack: ModelPack, lfw: Path, cache_dir: Path | None) -> dict[str, Any]:
    """Everybody against everybody among the photos of View 1's training list, through the pack's own detector."""
    pairs = read_pairs(lfw / "pairsDevTrain.txt")
    files = sorted({*pairs.first, *pairs.second})
    embedder = Embedder(pack, cache_dir=cache_dir)
    vectors, found = embedder.embed([lfw / "images" / file for file in files])
    embedder.remember()
    people = [file.split("/")[0] for file, kept in zip(files, found, strict=True) if kept]
    evidence = calibrate(vectors[found], people, "LFW View 1, pairsDevTrain, central face of each photo")
    return {**evidence, "photos_without_face": int((~found).sum()), "recogniser": pack.recognition.fingerprint()}


def _lfw_crops(detector: Detector, lfw: Path) -> Crops:
    files = sorted(set(read_pairs(lfw / "pairsDevTrain.txt").first))[:PARITY_IMAGES]
    crops = []
    for file in files:
        image = read_rgb(lfw / "images" / file)
        faces = detector.detect([image])[0]
        if len(faces):
            crops.append(align(image, faces.landmarks_xy[:1])[0])
    return np.stack(crops)
