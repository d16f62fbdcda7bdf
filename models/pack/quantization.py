"""INT8 files of any pack, calibrated on photos without names, and their loss against fp32 on each engine."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.checksums import sha256_of
from models.engines.selection import (
    EngineChoice,
    EnginePreference,
    available_precisions,
    choose_engine,
    open_with_engine,
)
from models.errors import PackError, RuntimeUnavailableError
from models.pack.int8_samples import Crops, QuantizationSamples, collect_samples
from models.pack.manifest import INT8_FILE, ModelPack
from models.pack.writing import write_verified
from models.runtime.dynamic_shapes import make_dynamic
from models.runtime.network import Engine, Float, Network, is_ir
from models.runtime.onnx_files import finalize_onnx, restore_fp32_weights
from models.runtime.onnx_runtime import OnnxNetwork
from models.runtime.quantization import Quantizer
from models.vision.detection import Detector
from models.vision.pixels import to_planes
from models.vision.precision_loss import cosine_loss, detection_shift
from models.vision.recognition import Recognizer
from models.vision.specs import DetectionSpec, NetworkSpec, RecognitionSpec

INT8_FOLDER: Final = "int8"
"""Subfolder of a pack: InsightFace opens every ONNX file beside the manifest."""
MIN_MEAN_COSINE: Final = 0.99
MAX_LANDMARK_SHIFT: Final = 0.05
"""Largest 95th percentile of the landmarks' movement, in eye distances."""
MAX_FACES_LOST: Final = 0.01
SEARCH_SAMPLES: Final = 48
"""Number of crops, or of photos, on which each choice of layers is measured."""
EMBED_ROWS: Final = 64
BATCH_ROWS: Final = 16
Measured = dict[str, Any]
SEARCH_TARGET: Final = 0.7
"""Share of the limits that the choice of layers aims at, since it sees fewer faces than the final measurement."""
SEARCH_S: Final = 120.0
MIN_SPEEDUP: Final = 1.1
"""Smallest gain over the best other precision. Some networks are faster in bf16."""
SPEED_ROUNDS: Final = 25


@dataclass(frozen=True)
class Int8Result:
    """Outcome for one network.

    Attributes:
        task: detection or recognition.
        fp32_layers: number of layers with weights that stay fp32, of ``layers``.
        engines: measured loss by engine, with ``accepted``.
        speedup: rate on ``engine`` in INT8, in units of the rate in the precision chosen without INT8.
        accepted: on ``engine``, which will run the file, it is faster and the loss is within the limits; else nothing
            was installed.
    """

    task: str
    layers: int
    fp32_layers: int
    engine: Engine
    engines: dict[Engine, Measured]
    speedup: float

    @property
    def accepted(self) -> bool:
        return bool(self.engines[self.engine]["accepted"]) and self.speedup >= MIN_SPEEDUP


def quantize_pack(
    pack: ModelPack,
    photos: Iterable[NDArray[np.uint8]],
    preference: EnginePreference | None = None,
    note: str = "",
) -> list[Int8Result]:
    """Write INT8 files of a pack's networks into it, and measure their loss on every engine.

    A network that loses more than the limits, or gains no speed, gets no file.

    Args:
        photos: (H, W, 3) RGB, like those that the service will see. One half sets ranges, the other measures the loss.
        preference: pinned settings of the service.
        note: description of the photos, for the record.

    Raises:
        PackError: the photos have too few faces, or the pack cannot be quantized or written.
        RuntimeUnavailableError: no engine multiplies bytes fast on this processor.
    """
    if is_ir(pack.recognition.path):
        raise PackError(pack.recognition.path.name, "is in OpenVINO's format: INT8 files are made of ONNX files")
    preference = preference or EnginePreference()
    engines = [name for name, precisions in available_precisions().items() if "int8" in precisions]
    wanted: Engine | None = preference.engine if preference.provider is None else "onnxruntime"
    engines.sort(key=lambda name: name != wanted)
    if not engines or wanted not in (None, *engines):
        raise RuntimeUnavailableError("this processor has no fast INT8: a quantized network would be slower here")
    network = open_with_engine(pack.detection, EngineChoice("onnxruntime", "fp32", ""), EnginePreference())
    detector = Detector(network, pack.detection)
    was_opened = network.input_shape != OnnxNetwork(pack.detection.path).input_shape
    samples = collect_samples(photos, detector, pack.recognition.alignment)
    judges: dict[str, Judge] = {
        "detection": DetectorJudge(pack.detection, detector, samples),
        "recognition": RecognizerJudge(pack.recognition, samples),
    }
    files: dict[str, Any] = {}
    results = []
    for task, judge in judges.items():
        spec = judge.spec
        with _reporting(spec), quantizing(spec, judge.batches(), task == "detection" and was_opened) as quantizer:
            result, file = _quantize(task, quantizer, judge, engines)
            results.append(result)
            if result.accepted:
                # Named by its content: until the list names it, the pack keeps its earlier file.
                checksum = sha256_of(file)
                target = spec.path.parent / INT8_FOLDER / f"{spec.path.stem}-{checksum[:12]}.onnx"
                target.parent.mkdir(exist_ok=True)
                file.replace(target)
                known = {"file": pack.name_of(target), "sha256": checksum, "of": sha256_of(spec.path)}
                measured = {"engines": result.engines, "photos": note, "speedup": round(result.speedup, 2)}
                files[task] = {**known, **measured}
    if pack.has_int8 or files:
        made = write_verified(pack.directory / INT8_FILE, files)
        listed = {spec.int8.path for spec in (made.detection, made.recognition) if spec.int8 is not None}
        for left in {*(pack.directory / INT8_FOLDER).glob("*.onnx")} - listed:  # of an interrupted quantization too
            left.unlink()
    return results


@contextmanager
def quantizing(spec: NetworkSpec, batches: Iterable[Float], dynamic: bool = False) -> Iterator[Quantizer]:
    """Yield a quantizer of a network, whose temporary files are removed at the end.

    Args:
        dynamic: quantize the network with open batch and sides, as `make_dynamic` writes it.
    """
    with tempfile.TemporaryDirectory(dir=spec.path.parent) as work:
        wide = Path(work) / "wide.onnx"
        restore_fp32_weights(spec.path, wide)
        if dynamic and (graph := make_dynamic(wide)) is not None:
            wide.write_bytes(graph)
        # A recognizer's batch has many faces. A detector's photo is a batch of its own, and its faces are rare.
        yield Quantizer(wide, batches, Path(work), isinstance(spec, RecognitionSpec))


def write_int8(quantizer: Quantizer, spec: NetworkSpec, target: Path, excluded: Collection[str]) -> None:
    """Write the INT8 file of a network, whose ``excluded`` layers stay fp32."""
    quantizer.write(target, excluded)
    finalize_onnx(target, target, {"kith.int8_of": sha256_of(spec.path)})


@contextmanager
def _reporting(spec: NetworkSpec) -> Iterator[None]:
    """Raise PackError for the quantizer's exceptions, which have many unrelated types."""
    try:
        yield
    except (PackError, RuntimeUnavailableError, OSError):
        raise
    except Exception as error:
        raise PackError(spec.path.name, f"cannot be quantized ({type(error).__name__}: {error})") from error


def _quantize(task: str, quantizer: Quantizer, judge: Judge, engines: list[Engine]) -> tuple[Int8Result, Path]:
    """Quantize one network; return the outcome and the file in the work folder."""
    file = quantizer.folder / "int8.onnx"
    engine = engines[0]

    def excess(excluded: frozenset[str]) -> float:
        quantizer.write(file, excluded)
        return judge.excess(judge.measure(file, engine, few=True))

    excluded = choose_fp32_layers(quantizer.layers, quantizer.sensitive, excess, SEARCH_S)
    write_int8(quantizer, judge.spec, file, excluded)
    measured = {name: judge.measure(file, name) for name in engines}
    speedup = _speedup(judge, file, engine)
    return Int8Result(task, len(quantizer.layers), len(excluded), engine, measured, speedup), file


def _speedup(judge: Judge, file: Path, engine: Engine) -> float:
    """Return the median ratio of the times in the best float precision and in INT8, for one input, in turns."""
    plain = replace(judge.spec, int8=None)
    choice = choose_engine(plain, EnginePreference(engine=engine), available_precisions(engine))
    networks = open_with_engine(plain, choice, EnginePreference()), judge.open(file, engine)
    batch = next(judge.batches())[:1]
    ratios = []
    for turn in range(SPEED_ROUNDS):
        times = []
        for network in networks:
            start = time.perf_counter()
            network.run(batch)
            times.append(time.perf_counter() - start)
        if turn >= 2:  # the first runs compile
            ratios.append(times[0] / times[1])
    return float(np.median(ratios))


def choose_fp32_layers(
    layers: tuple[str, ...],
    sensitive: frozenset[str],
    excess: Callable[[frozenset[str]], float],
    limit_s: float,
) -> frozenset[str]:
    """Return the layers that stay fp32: the sensitive ones, and as few others as bring the loss to the target.

    Each layer is quantized alone to measure its loss, from both ends of the network until ``limit_s`` seconds passed.
    At most half of the layers stay fp32.

    Args:
        excess: function from the layers that stay fp32 to the loss in units of its limit.
    """
    if excess(sensitive) <= SEARCH_TARGET:
        return sensitive
    candidates = [name for name in layers if name not in sensitive]
    from_ends = [candidates[row // 2 if row % 2 else -1 - row // 2] for row in range(len(candidates))]
    alone: dict[str, float] = {}
    end = time.monotonic() + limit_s
    for name in from_ends:
        if time.monotonic() >= end:
            break
        alone[name] = excess(frozenset(layers) - {name})
    worst = sorted(alone, key=lambda name: -alone[name])[: len(layers) // 2]
    low, high = 0, len(worst)
    while low < high:
        count = (low + high) // 2
        if excess(sensitive | set(worst[:count])) <= SEARCH_TARGET:
            high = count
        else:
            low = count + 1
    return sensitive | set(worst[:low])


def describe_loss(measured: Measured) -> str:
    """Describe the loss of one network on one engine."""
    if "cosine" not in measured:
        shift = measured["landmark_shift"]
        moved = shift.get("eye_distances", {}).get("p95", 0.0)
        lost = f"{shift['lost']} of {shift['faces']} faces lost"
        return f"landmarks move by at most {moved:.1%} of the eye distance in 95 %, {lost}"
    cosine = measured["cosine"]
    return f"cosine to fp32 {cosine['mean']:.4f}, at worst {cosine['worst']:.4f}"


class Judge(ABC):
    """Judge of the loss of an INT8 file against the fp32 network."""

    spec: NetworkSpec

    @abstractmethod
    def batches(self) -> Iterator[Float]:
        """Yield the inputs that set the ranges."""

    @abstractmethod
    def loss(self, network: Network, rows: slice) -> Measured:
        """Return the loss of a network on some of the samples."""

    @abstractmethod
    def excess(self, measured: Measured) -> float:
        """Return the loss in units of its limit."""

    def open(self, file: Path, engine: Engine) -> Network:
        """Open an INT8 file."""
        return open_with_engine(
            replace(self.spec, path=file, int8=None), EngineChoice(engine, "int8", ""), EnginePreference()
        )

    def measure(self, file: Path, engine: Engine, few: bool = False) -> Measured:
        """Return the loss of an INT8 file on an engine, with ``accepted``; on fewer samples if ``few``."""
        found = self.loss(self.open(file, engine), slice(SEARCH_SAMPLES if few else None))
        return {**found, "accepted": self.excess(found) <= 1}


class RecognizerJudge(Judge):
    spec: RecognitionSpec

    def __init__(self, spec: RecognitionSpec, samples: QuantizationSamples) -> None:
        self.spec, self._samples = spec, samples
        self._exact = _embed(Recognizer(OnnxNetwork(spec.path), spec), samples.measured_crops)

    def batches(self) -> Iterator[Float]:
        crops, shape = self._samples.crops, (3, *self.spec.shape)
        for start in range(0, len(crops), BATCH_ROWS):
            batch = crops[start : start + BATCH_ROWS]
            yield to_planes(batch, self.spec.normalization, np.empty((len(batch), *shape), np.float32))

    def loss(self, network: Network, rows: slice) -> Measured:
        vectors = _embed(Recognizer(network, self.spec), self._samples.measured_crops[rows])
        return {"cosine": cosine_loss(self._exact[rows], vectors)}

    def excess(self, measured: Measured) -> float:
        return float((1 - measured["cosine"]["mean"]) / (1 - MIN_MEAN_COSINE))


class DetectorJudge(Judge):
    spec: DetectionSpec

    def __init__(self, spec: DetectionSpec, detector: Detector, samples: QuantizationSamples) -> None:
        self.spec, self._fp32, self._samples = spec, detector, samples
        self._exact = [detector.detect([photo])[0] for photo in samples.measured_photos]

    def batches(self) -> Iterator[Float]:
        for photo in self._samples.photos:  # each on its own canvas, as in serving
            yield self._fp32.prepare(photo).planes[None]

    def loss(self, network: Network, rows: slice) -> Measured:
        detector = Detector(network, self.spec)
        faces = [detector.detect([photo])[0] for photo in self._samples.measured_photos[rows]]
        return {"landmark_shift": detection_shift(self._exact[rows], faces)}

    def excess(self, measured: Measured) -> float:
        shift = measured["landmark_shift"]
        if not shift["faces"] or "eye_distances" not in shift:
            return np.inf
        lost = shift["lost"] / shift["faces"]
        return float(max(shift["eye_distances"]["p95"] / MAX_LANDMARK_SHIFT, lost / MAX_FACES_LOST))


def _embed(recognizer: Recognizer, crops: Crops) -> Float:
    return np.concatenate([recognizer.embed(crops[i : i + EMBED_ROWS]) for i in range(0, len(crops), EMBED_ROWS)])
