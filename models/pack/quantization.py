"""INT8 variants of any pack, calibrated and measured on photos without names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
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
from models.pack.int8_loss import DetectorJudge, Judge, Measured, RecognizerJudge
from models.pack.int8_samples import collect_samples, read_people
from models.pack.manifest import ModelPack
from models.pack.variants import (
    int8_entry,
    int8_path,
    networks_of,
    other_entries,
    quantizing,
    remove_unlisted_int8,
    write_int8,
)
from models.pack.writing import update_variants
from models.runtime.network import Engine
from models.runtime.onnx_runtime import OnnxNetwork
from models.runtime.quantization import Quantizer
from models.vision.detection import Detector
from models.vision.specs import NetworkSpec

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
    people: Path | None = None,
    preference: EnginePreference | None = None,
    note: str = "",
) -> list[Int8Result]:
    """Write INT8 variants of a pack's networks into it, and measure their loss on every engine.

    A network that loses more than the limits, or gains no speed, gets no variant.

    Args:
        photos: (H, W, 3) RGB, like those that the service will see. One half sets ranges, the other measures the loss.
        people: folder with a folder of photos per person, to measure FNIR too.
        preference: pinned settings of the service.
        note: description of the photos, for the record.

    Raises:
        PackError: the photos have too few faces, or the pack cannot be quantized or written.
        RuntimeUnavailableError: no engine multiplies bytes fast on this processor.
    """
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
    crops = None if people is None else read_people(people, detector, pack.recognition.alignment)
    judges: dict[str, Judge] = {
        "detection": DetectorJudge(pack.detection, detector, samples),
        "recognition": RecognizerJudge(pack.recognition, samples, crops),
    }
    entries: dict[str, Any] = {task: other_entries(pack, spec) for task, spec in networks_of(pack).items()}
    results = []
    for task, spec in networks_of(pack).items():
        with (
            _reporting(spec),
            quantizing(spec, judges[task].batches(), task == "detection" and was_opened) as quantizer,
        ):
            result, file = _quantize(task, quantizer, judges[task], engines)
            results.append(result)
            if result.accepted:
                # Named by its content: until the manifest names it, the pack keeps its earlier file.
                target = int8_path(spec).with_stem(f"{spec.path.stem}-{sha256_of(file)[:12]}")
                file.replace(target)
                measured = {"engines": result.engines, "photos": note, "speedup": round(result.speedup, 2)}
                entries[task]["int8"] = int8_entry(pack, spec, target, measured)
    if pack.has_int8 or any(result.accepted for result in results):
        made = update_variants(pack.directory, {task: listed for task, listed in entries.items() if listed})
        remove_unlisted_int8(made)
    return results


@contextmanager
def _reporting(spec: NetworkSpec) -> Iterator[None]:
    """Raise PackError for the quantizer's exceptions, which have many unrelated types."""
    try:
        yield
    except (PackError, RuntimeUnavailableError):
        raise
    except OSError as error:
        raise PackError("variants", f"cannot be written beside {spec.path} ({error.strerror})") from error
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
    plain = replace(judge.spec, variants=tuple(v for v in judge.spec.variants if v.precision != "int8"))
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
