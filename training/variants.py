"""A pack's networks in other numbers: INT8 files made from its own, and what they and bf16 lose, measured."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.detection import Detector, Faces, choose_canvas, lay_out
from models.engines import Abilities, Choice, Spec, Wish, abilities, open_chosen
from models.network import Engine, Float, Precision
from models.pack import DetectionSpec, ModelPack, RecognitionSpec, load_pack, sha256_of, update_variants
from models.pixels import to_planes
from models.recognition import Recogniser
from models.risk import Calibration, fmr_for_fpir
from training.benchmarks import LfwCrops, embed_crops, load_lfw_crops
from training.config import ConfigError, DataConfig
from training.data.identities import list_identities, read_rgb
from training.detection.data import load_annotated
from training.detection.evaluation import evaluate_detector
from training.evaluate import (
    BATCH,
    Embeddings,
    OpenSetProtocol,
    central_crops,
    files_of,
    people_of,
    read_open_set,
    read_pairs,
)
from training.export import store, widen
from training.metrics import best_threshold, bootstrap, fold_decisions, search, threshold_at_fpir
from training.quantisation import delicate, quantise

FOLDER: Final = "int8"
"""Of a pack: InsightFace opens every ONNX file that lies beside the manifest."""
CALIBRATION_CROPS: Final = 512
CALIBRATION_PHOTOS: Final = 96
SHIFT_PHOTOS: Final = 500
SURE_SCORE: Final = 0.6
FMR: Final = 1e-3
FPIR: Final = 0.01
REFERENCE: Final = Choice("onnxruntime", "fp32", "the reference")
Measured = dict[str, Any]


def quantise_pack(directory: Path, data: Path, cache_dir: Path) -> ModelPack:
    """Write INT8 variants of both networks into a pack, and what they and bf16 lose.

    Args:
        data: holds celeba/, wider/ and scenes/, whose training photos set the ranges, and lfw/ and wider/, on which the
            loss is measured.

    Raises:
        PackError: the pack has no manifest version 2.
        ConfigError: data is absent.
    """
    pack = load_pack(directory)
    if pack.calibration is None:
        raise ConfigError(f"{pack.model_id} has no calibration: what a gallery feels is judged at its thresholds")
    if absent := [name for name in ("celeba", "wider", "scenes", "lfw") if not (data / name).is_dir()]:
        raise ConfigError(f"{data} lacks {' and '.join(absent)}")
    files = _write_files(pack, data)
    pack = update_variants(pack.directory, _listed(pack, files, {}, {}))
    able = abilities()
    crops = load_lfw_crops(data / "lfw", pack.detection, cache_dir, alignment=pack.recognition.alignment)
    exact = embeddings(pack, crops, REFERENCE)
    recognition = measure_recogniser(pack, crops, exact, able)
    detection = measure_detector(pack, data, exact, able)
    return update_variants(pack.directory, _listed(pack, files, recognition, detection))


def _write_files(pack: ModelPack, data: Path) -> dict[str, Path]:
    """By task."""
    folder = pack.directory / FOLDER
    folder.mkdir(exist_ok=True)
    files = {}
    tasks: list[tuple[str, Spec, Iterator[Float]]] = [
        ("detection", pack.detection, _photos(pack.detection, data)),
        ("recognition", pack.recognition, _crops(pack.recognition, data)),
    ]
    for task, spec, batches in tasks:
        files[task] = folder / spec.path.name
        with tempfile.TemporaryDirectory(dir=pack.directory) as work:
            wide, small = Path(work) / "wide.onnx", Path(work) / "small.onnx"
            widen(spec.path, wide)
            quantise(wide, small, batches, delicate(wide))
            store(small, small, {"kith.int8_of": sha256_of(spec.path)})
            shutil.move(small, files[task])
    return files


def _crops(spec: RecognitionSpec, data: Path) -> Iterator[Float]:
    """CelebA's, evenly from all people."""
    listed = list_identities(DataConfig(data / "celeba"))
    side = spec.alignment.size_px
    rows = np.linspace(0, len(listed) - 1, CALIBRATION_CROPS).astype(int)
    for start in range(0, len(rows), BATCH):
        crops = np.stack([listed.read(int(row)) for row in rows[start : start + BATCH]])
        yield to_planes(crops, spec.normalisation, np.empty((len(crops), 3, side, side), np.float32))


def _photos(spec: DetectionSpec, data: Path) -> Iterator[Float]:
    """Training photos of both sets, each on its own canvas, as the detector is fed."""
    for photos in (load_annotated(data / "wider", "train"), load_annotated(data / "scenes")):
        for row in np.linspace(0, len(photos) - 1, CALIBRATION_PHOTOS // 2).astype(int):
            image = photos[row].image
            yield lay_out(image, choose_canvas(*image.shape[:2]), spec.normalisation)[None]


def _listed(
    pack: ModelPack, files: Mapping[str, Path], recognition: Mapping[str, Measured], detection: Mapping[str, Measured]
) -> dict[str, Any]:
    """The manifest's ``variants``."""
    listed: dict[str, Any] = {}
    for task, spec, measured in (
        ("detection", pack.detection, detection),
        ("recognition", pack.recognition, recognition),
    ):
        of = sha256_of(spec.path)
        small = {"file": f"{FOLDER}/{files[task].name}", "sha256": sha256_of(files[task]), "of": of}
        listed[task] = {"int8": {**small, "measured": measured.get("int8", {})}}
        if "bf16" in measured:
            listed[task]["bf16"] = {"of": of, "measured": measured["bf16"]}
    return listed


def _tried(able: Abilities) -> Iterator[tuple[Engine, Precision]]:
    for engine, precisions in able.items():
        for precision in ("int8", "bf16"):
            if precision in precisions:
                yield engine, precision


def _by_precision(found: Mapping[tuple[Engine, Precision], Measured]) -> dict[str, Measured]:
    """What each engine gives, and the most that any of them loses."""
    by_precision: dict[str, Measured] = {}
    for (engine, precision), measured in found.items():
        known = by_precision.setdefault(precision, {"points_lost": -100.0, "engines": {}})
        known["engines"][engine] = measured
        known["points_lost"] = max(known["points_lost"], measured["points_lost"])
    return by_precision


def embeddings(pack: ModelPack, crops: LfwCrops, choice: Choice) -> Embeddings:
    """LFW as a pack's recogniser sees it in these numbers, on crops that its detector gave in fp32."""
    recogniser = Recogniser(open_chosen(pack.recognition, choice, Wish()), pack.recognition)
    vectors = np.zeros((len(crops.files), recogniser.dimension), np.float32)
    vectors[crops.found] = embed_crops(recogniser.embed, crops.crops_NHWC[crops.found])
    return Embeddings(crops.files, vectors, crops.found)


def measure_recogniser(pack: ModelPack, crops: LfwCrops, exact: Embeddings, able: Abilities) -> dict[str, Measured]:
    """By precision: LFW accuracy, cosines to fp32, and galleries of one with probes of the other."""
    lfw = crops.root
    felt = _Galleries(pack, lfw)
    found = {}
    for engine, precision in _tried(able):
        other = embeddings(pack, crops, Choice(engine, precision, "measured"))
        cosines = np.einsum("nd,nd->n", exact.vectors, other.vectors, dtype=np.float64)[crops.found]
        view2 = _view2(exact, other, lfw)
        found[engine, precision] = {
            "points_lost": view2["points_lost"],
            "lfw_view1": _view1(exact, other, lfw),
            "lfw_view2": view2,
            "cosine": {"mean": float(cosines.mean()), "worst": float(cosines.min()), "crops": len(cosines)},
            "galleries": {
                "fp32, probes fp32": felt.judge(exact, exact),
                f"fp32, probes {precision}": felt.judge(exact, other),
                f"{precision}, probes {precision}": felt.judge(other, other),
            },
        }
    return _by_precision(found)


def _view1(exact: Embeddings, other: Embeddings, lfw: Path) -> Measured:
    """All of its pairs, its test list alone has a thousand, at the threshold that suits each kind of numbers best."""
    lists = [read_pairs(lfw / name) for name in ("pairsDevTrain.txt", "pairsDevTest.txt")]
    same = np.concatenate([pairs.same for pairs in lists])
    ones, others = (np.concatenate([e.similarities(pairs) for pairs in lists]) for e in (exact, other))
    before, after = (float(((s >= best_threshold(s, same)) == same).mean()) for s in (ones, others))
    return {"fp32": before, "variant": after, "points_lost": _points(before - after)}


def _view2(exact: Embeddings, other: Embeddings, lfw: Path) -> Measured:
    """Each kind of numbers at thresholds of its own; what is lost in points, with the 95 % interval over people of the
    difference pair by pair."""
    pairs = read_pairs(lfw / "pairs.txt")
    before, after = (
        fold_decisions(e.similarities(pairs), pairs.same, pairs.folds) == pairs.same for e in (exact, other)
    )
    lost = before.astype(np.float64) - after
    low, high = bootstrap(lambda rows: lost[rows].mean(keepdims=True), people_of(pairs.first))
    return {
        "fp32": float(before.mean()),
        "variant": float(after.mean()),
        "points_lost": _points(lost.mean()),
        "interval": [_points(low[0]), _points(high[0])],
    }


def _points(share: float) -> float:
    return round(100 * float(share), 3)


class _Galleries:
    """LFW's open-set protocol, everybody at the pack's own thresholds, which are fp32's."""

    def __init__(self, pack: ModelPack, lfw: Path) -> None:
        self._protocol: OpenSetProtocol = read_open_set(lfw / "openset_protocol.json")
        assert pack.calibration is not None  # noqa: S101 - quantise_pack has seen to it
        calibration = Calibration.from_document(pack.calibration)
        self._pair = calibration.threshold_at_fmr(FMR).similarity
        self._search = calibration.threshold_at_fmr(fmr_for_fpir(FPIR, len(self._protocol.gallery))).similarity

    def judge(self, enrolled: Embeddings, probes: Embeddings) -> Measured:
        gallery = enrolled.vectors[enrolled.rows(self._protocol.gallery)].astype(np.float64)
        mated, strangers = (
            probes.vectors[probes.rows(files)].astype(np.float64)
            for files in (self._protocol.mated, self._protocol.strangers)
        )
        mates = self._protocol.mates()
        similarity = mated @ gallery.T
        own = np.zeros(similarity.shape, bool)
        own[np.arange(len(mates)), mates] = True
        impostors = np.concatenate([similarity[~own], (strangers @ gallery.T).ravel()])
        hits, alarms = search(gallery, mated, mates, strangers)
        return {
            "tar": float((similarity[own] >= self._pair).mean()),
            "fmr": float((impostors >= self._pair).mean()),
            "fmr_asked": FMR,
            "fnir": float(1 - (hits >= self._search).mean()),
            "fpir": float((alarms >= self._search).mean()),
            "fpir_asked": FPIR,
            "fnir_by_hindsight": float(1 - (hits >= threshold_at_fpir(alarms, FPIR)).mean()),
        }


def measure_detector(pack: ModelPack, data: Path, exact: Embeddings, able: Abilities) -> dict[str, Measured]:
    """By precision: recall on WIDER FACE, how far landmarks move, and LFW's View 2 through it and the pack's recogniser
    in fp32."""
    photos = load_annotated(data / "wider", "val")
    images = data / "lfw" / "images"
    files = sorted(files_of(data / "lfw", "view2"))
    spread = [read_rgb(images / files[row]) for row in np.linspace(0, len(files) - 1, SHIFT_PHOTOS).astype(int)]
    recogniser = Recogniser(open_chosen(pack.recognition, REFERENCE, Wish()), pack.recognition)

    def seen(detector: Detector) -> tuple[float, list[Faces]]:
        faces = [detector.detect([image])[0] for image in (*spread, *(photo.image for photo in photos))]
        return evaluate_detector(detector, photos).recall, faces

    recall, faces = seen(Detector(open_chosen(pack.detection, REFERENCE, Wish()), pack.detection))
    found = {}
    for engine, precision in _tried(able):
        detector = Detector(open_chosen(pack.detection, Choice(engine, precision, "measured"), Wish()), pack.detection)
        vectors, shown = np.zeros((len(files), recogniser.dimension), np.float32), np.zeros(len(files), bool)
        for rows, crops in central_crops(detector, [images / file for file in files], recogniser.alignment):
            vectors[rows], shown[rows] = recogniser.embed(crops), True
        view2 = _view2(exact, Embeddings(tuple(files), vectors, shown), data / "lfw")
        other_recall, other_faces = seen(detector)
        lost = _points(recall - other_recall)
        found[engine, precision] = {
            "points_lost": max(lost, view2["points_lost"]),
            "wider_val_recall": {"fp32": recall, "variant": other_recall, "points_lost": lost},
            "lfw_view2": view2,
            "landmark_shift": _shift(faces, other_faces),
        }
    return _by_precision(found)


def _shift(exact: list[Faces], other: list[Faces]) -> Measured:
    """Of surely found faces, the mean distance of their landmarks to those of the same face in other numbers."""
    moved, in_eyes, lost = [], [], 0
    for before, after in zip(exact, other, strict=True):
        for row in np.flatnonzero(before.scores >= SURE_SCORE):
            points = before.landmarks_xy[row]
            eyes = float(np.linalg.norm(points[0] - points[1]))
            off = np.linalg.norm(after.landmarks_xy - points, axis=2).mean(1)
            if not len(off) or off.min() > eyes:
                lost += 1
                continue
            moved.append(off.min())
            in_eyes.append(off.min() / eyes)
    return {
        "faces": len(moved) + lost,
        "lost": lost,
        "pixels": {"median": float(np.median(moved)), "p95": float(np.quantile(moved, 0.95))},
        "eye_distances": {"median": float(np.median(in_eyes)), "p95": float(np.quantile(in_eyes, 0.95))},
    }
