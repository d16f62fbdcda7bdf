"""INT8 variants of a pack's networks, and the measured loss of INT8 and bf16."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.checksums import sha256_of
from models.engines.selection import (
    EngineChoice,
    EnginePreference,
    PrecisionsByEngine,
    available_precisions,
    open_with_engine,
)
from models.pack.loading import load_pack
from models.pack.manifest import ModelPack
from models.pack.variants import int8_entry, int8_path, networks_of, quantizing, write_int8
from models.pack.writing import update_variants
from models.risk.calibration import Calibration, fmr_for_fpir
from models.risk.search_rates import rates_at
from models.runtime.network import Engine, Float, Precision
from models.vision.alignment import realign_crops
from models.vision.detection import Detections, Detector, choose_canvas, fill_canvas
from models.vision.pixels import to_planes
from models.vision.precision_loss import cosine_loss, detection_shift
from models.vision.recognition import Recognizer
from models.vision.specs import DetectionSpec, NetworkSpec, RecognitionSpec
from training.config import ConfigError
from training.data.identities import decode_rgb, read_rgb
from training.detection.photos import load_annotated
from training.evaluation.detection import evaluate_detector
from training.evaluation.embedding import DETECT_BATCH_SIZE, Embeddings, central_crops
from training.evaluation.lfw import (
    LfwCrops,
    embed_lfw,
    files_of,
    load_lfw_crops,
    people_of,
    read_open_set,
    read_pairs,
)
from training.evaluation.metrics import best_threshold, bootstrap, fold_decisions

CALIBRATION_CROPS: Final = 512
FAIRFACE: Final = Path("faces") / "fairface.tar"
"""112x112 crops on the standard template, in the research data."""
CALIBRATION_PHOTOS: Final = 96
SHIFT_PHOTOS: Final = 500
FMR: Final = 1e-3
FPIR: Final = 0.01
REFERENCE: Final = EngineChoice("onnxruntime", "fp32", "the reference")
Metrics = dict[str, Any]


def quantize_pack(directory: Path, data: Path, cache_dir: Path, photos: Sequence[Path] = ()) -> ModelPack:
    """Write INT8 variants of both networks into a pack, with the measured loss of INT8 and bf16.

    Args:
        data: folder with faces/, whose crops set the recognizer's ranges, and lfw/ and wider/ for measuring.
        photos: annotated folders whose training photos set the detector's ranges, instead of those of data/wider and
            data/scenes.

    Raises:
        PackError: the pack has no manifest version 2.
        ConfigError: data or the calibration is missing.
    """
    pack = load_pack(directory)
    if pack.calibration is None:
        raise ConfigError(f"{pack.model_id} has no calibration, whose thresholds the measurement needs")
    photos = photos or (data / "wider", data / "scenes")
    if missing := [folder for folder in (data / "faces", data / "wider", data / "lfw", *photos) if not folder.is_dir()]:
        raise ConfigError(f"{', '.join(str(folder) for folder in missing)}: no such folder")
    if not (data / FAIRFACE).is_file():
        raise ConfigError(f"{data / FAIRFACE} does not exist")
    files = _write_files(pack, data, photos)
    pack = update_variants(pack.directory, _manifest_entries(pack, files, {}, {}))
    available = available_precisions()
    crops = load_lfw_crops(data / "lfw", pack.detection, cache_dir, alignment=pack.recognition.alignment)
    exact = embeddings(pack, crops, REFERENCE)
    recognition = measure_recognizer(pack, crops, exact, available)
    detection = measure_detector(pack, data, exact, available)
    return update_variants(pack.directory, _manifest_entries(pack, files, recognition, detection))


def _write_files(pack: ModelPack, data: Path, photos: Sequence[Path]) -> dict[str, Path]:
    """Return the INT8 files by task."""
    files = {}
    tasks: list[tuple[str, NetworkSpec, Iterator[Float]]] = [
        ("detection", pack.detection, _photos(pack.detection, photos)),
        ("recognition", pack.recognition, _crops(pack.recognition, data)),
    ]
    for task, spec, batches in tasks:
        with quantizing(spec, batches) as quantizer:
            files[task] = int8_path(spec)
            write_int8(quantizer, spec, files[task].with_suffix(".partial"), quantizer.sensitive)
    for file in files.values():
        file.with_suffix(".partial").replace(file)
    return files


def _crops(spec: RecognitionSpec, data: Path) -> Iterator[Float]:
    """Yield batches of evenly spaced crops of FairFace, which has every age and skin tone."""
    side = spec.alignment.size_px
    with tarfile.open(data / FAIRFACE) as archive:
        members = [member for member in archive if member.isfile()]
        chosen = [members[row] for row in np.linspace(0, len(members) - 1, CALIBRATION_CROPS).astype(int)]
        read = [decode_rgb(_content(archive, member), member.name) for member in chosen]
    for start in range(0, len(read), DETECT_BATCH_SIZE):
        crops = realign_crops(np.stack(read[start : start + DETECT_BATCH_SIZE]), spec.alignment)
        yield to_planes(crops, spec.normalization, np.empty((len(crops), 3, side, side), np.float32))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    return b"" if stream is None else stream.read()


def _photos(spec: DetectionSpec, folders: Sequence[Path]) -> Iterator[Float]:
    """Yield training photos, as many of each folder, each on its own canvas as in serving."""
    for folder in folders:
        photos = load_annotated(folder, "train", CALIBRATION_PHOTOS // len(folders))
        for image in (photo.image for photo in photos):
            yield fill_canvas(image, choose_canvas(*image.shape[:2]), spec.normalization)[None]


def _manifest_entries(
    pack: ModelPack, files: Mapping[str, Path], recognition: Mapping[str, Metrics], detection: Mapping[str, Metrics]
) -> dict[str, Any]:
    """Return the ``variants`` of the manifest."""
    listed: dict[str, Any] = {}
    for task, measured in (("detection", detection), ("recognition", recognition)):
        spec = networks_of(pack)[task]
        listed[task] = {"int8": int8_entry(pack, spec, files[task], measured.get("int8", {}))}
        if "bf16" in measured:
            listed[task]["bf16"] = {"of": sha256_of(spec.path), "measured": measured["bf16"]}
    return listed


def _measured_variants(available: PrecisionsByEngine) -> Iterator[tuple[Engine, Precision]]:
    for engine, precisions in available.items():
        for precision in ("int8", "bf16"):
            if precision in precisions:
                yield engine, precision


def _by_precision(found: Mapping[tuple[Engine, Precision], Metrics]) -> dict[str, Metrics]:
    """Group by precision, with the largest loss over engines."""
    by_precision: dict[str, Metrics] = {}
    for (engine, precision), measured in found.items():
        known = by_precision.setdefault(precision, {"points_lost": -100.0, "engines": {}})
        known["engines"][engine] = measured
        known["points_lost"] = max(known["points_lost"], measured["points_lost"])
    return by_precision


def embeddings(pack: ModelPack, crops: LfwCrops, choice: EngineChoice) -> Embeddings:
    """Embed LFW crops of the fp32 detector with a variant of the recognizer."""
    network = open_with_engine(pack.recognition, choice, EnginePreference())
    return embed_lfw(Recognizer(network, pack.recognition).embed, crops)


def measure_recognizer(
    pack: ModelPack, crops: LfwCrops, exact: Embeddings, available: PrecisionsByEngine
) -> dict[str, Metrics]:
    """Return by precision: LFW accuracy, cosines to fp32, and mixed-precision gallery search."""
    lfw = crops.root
    measured_search = _gallery_search(pack, lfw)
    found = {}
    for engine, precision in _measured_variants(available):
        other = embeddings(pack, crops, EngineChoice(engine, precision, "measured"))
        view2 = _view2(exact, other, lfw)
        found[engine, precision] = {
            "points_lost": view2["points_lost"],
            "lfw_view1": _view1(exact, other, lfw),
            "lfw_view2": view2,
            "cosine": cosine_loss(exact.vectors[crops.found], other.vectors[crops.found]),
            "galleries": {
                "fp32, probes fp32": measured_search(exact, exact),
                f"fp32, probes {precision}": measured_search(exact, other),
                f"{precision}, probes {precision}": measured_search(other, other),
            },
        }
    return _by_precision(found)


def _view1(exact: Embeddings, other: Embeddings, lfw: Path) -> Metrics:
    """Compare accuracy if all pairs of View 1, each precision at its own best threshold."""
    lists = [read_pairs(lfw / name) for name in ("pairsDevTrain.txt", "pairsDevTest.txt")]
    same = np.concatenate([pairs.same for pairs in lists])
    ones, others = (np.concatenate([e.similarities(pairs) for pairs in lists]) for e in (exact, other))
    before, after = (float(((s >= best_threshold(s, same)) == same).mean()) for s in (ones, others))
    return {"fp32": before, "variant": after, "points_lost": _percentage_points(before - after)}


def _view2(exact: Embeddings, other: Embeddings, lfw: Path) -> Metrics:
    """Compare ten-fold accuracy, with the 95 % interval over people of the difference per pair, in points."""
    pairs = read_pairs(lfw / "pairs.txt")
    before, after = (
        fold_decisions(e.similarities(pairs), pairs.same, pairs.folds) == pairs.same for e in (exact, other)
    )
    lost = before.astype(np.float64) - after
    low, high = bootstrap(lambda rows: lost[rows].mean(keepdims=True), people_of(pairs.first))
    return {
        "fp32": float(before.mean()),
        "variant": float(after.mean()),
        "points_lost": _percentage_points(lost.mean()),
        "interval": [_percentage_points(low[0]), _percentage_points(high[0])],
    }


def _percentage_points(share: float) -> float:
    return round(100 * float(share), 3)


def _gallery_search(pack: ModelPack, lfw: Path) -> Callable[[Embeddings, Embeddings], Metrics]:
    """Return a function that searches enrolled photos for probes by LFW's open-set protocol, at the fp32 thresholds."""
    assert pack.calibration is not None  # noqa: S101 - checked by quantize_pack
    protocol, calibration = read_open_set(lfw / "openset_protocol.json"), Calibration.from_document(pack.calibration)

    def measure(enrolled: Embeddings, probes: Embeddings) -> Metrics:
        gallery, mated, strangers = (
            photos.vectors[photos.rows(files)].astype(np.float64)
            for photos, files in (
                (enrolled, protocol.gallery),
                (probes, protocol.mated),
                (probes, protocol.strangers),
            )
        )
        rates = rates_at(
            gallery,
            mated,
            protocol.mates(),
            strangers,
            pair_threshold=calibration.threshold_at_fmr(FMR).score,
            search_threshold=calibration.threshold_at_fmr(fmr_for_fpir(FPIR, len(gallery))).score,
            fpir=FPIR,
        )
        return {**rates, "fmr_asked": FMR}

    return measure


def measure_detector(
    pack: ModelPack, data: Path, exact: Embeddings, available: PrecisionsByEngine
) -> dict[str, Metrics]:
    """Return by precision: recall on WIDER FACE, landmark shift, and View 2 with the fp32 recognizer."""
    photos = load_annotated(data / "wider", "val")
    images = data / "lfw" / "images"
    files = sorted(files_of(data / "lfw", "view2"))
    sample = [read_rgb(images / files[row]) for row in np.linspace(0, len(files) - 1, SHIFT_PHOTOS).astype(int)]
    recognizer = Recognizer(open_with_engine(pack.recognition, REFERENCE, EnginePreference()), pack.recognition)

    def detect(detector: Detector) -> tuple[float, list[Detections]]:
        faces = [detector.detect([image])[0] for image in (*sample, *(photo.image for photo in photos))]
        return evaluate_detector(detector, photos).recall, faces

    recall, faces = detect(Detector(open_with_engine(pack.detection, REFERENCE, EnginePreference()), pack.detection))
    found = {}
    for engine, precision in _measured_variants(available):
        detector = Detector(
            open_with_engine(pack.detection, EngineChoice(engine, precision, "measured"), EnginePreference()),
            pack.detection,
        )
        vectors, found_face = np.zeros((len(files), recognizer.dimension), np.float32), np.zeros(len(files), bool)
        for rows, crops in central_crops(detector, [images / file for file in files], recognizer.alignment):
            vectors[rows], found_face[rows] = recognizer.embed(crops), True
        view2 = _view2(exact, Embeddings(tuple(files), vectors, found_face), data / "lfw")
        other_recall, other_faces = detect(detector)
        lost = _percentage_points(recall - other_recall)
        found[engine, precision] = {
            "points_lost": max(lost, view2["points_lost"]),
            "wider_val_recall": {"fp32": recall, "variant": other_recall, "points_lost": lost},
            "lfw_view2": view2,
            "landmark_shift": detection_shift(faces, other_faces),
        }
    return _by_precision(found)
