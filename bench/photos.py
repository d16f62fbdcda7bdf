"""Photos and packs that the benchmarks share: LFW, group photos, the serving benchmarks' gallery, other recognizers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from bench.common import ROOT, outside, say
from models.engines.selection import EnginePreference, open_network
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.runtime.network import Float
from models.vision.alignment import align
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from service.cli.tools.demo import package_file

PULLED: Final = ROOT / "data" / "models" / "open-model-zoo"
PEOPLE: Final = 3000
PROBES: Final = 200
GROUPS: Final = 24
GROUP_FACES: Final = range(4, 21)
JPEG_QUALITY: Final = 92
BATCH: Final = 32


def lfw_or_exit() -> Path:
    """Return LFW's folder in the research data, or exit if the photos are missing."""
    data = outside("KITH_DATA", "data")
    if not (data / "lfw" / "images").is_dir():
        sys.exit(f"The research data are not at {data}: set KITH_DATA (docs/training.md says what it must hold).")
    return data / "lfw"


def packs_beside_reference(load_reference: Callable[[Path], ModelPack] = load_pack) -> dict[str, ModelPack]:
    """Load ``bundled``, and ``reference`` if the reference models are present; report their absence."""
    packs = {"bundled": load_pack(BUNDLED_PACK)}
    reference = outside("KITH_REFERENCE", "reference")
    if any(reference.glob("*.onnx")):
        packs["reference"] = load_reference(reference)
    else:
        say(f"There are no reference models at {reference} (set KITH_REFERENCE): they are left out.")
    return packs


@dataclass(frozen=True)
class Person:
    name: str
    photos: Sequence[Path]


def people(data: Path) -> list[Person]:
    """Return the people of LFW, sorted by name."""
    folders = sorted(path for path in (data / "lfw" / "images").iterdir() if path.is_dir())
    return [Person(folder.name, sorted(folder.glob("*.jpg"))) for folder in folders]


def lfw_probes(everybody: Sequence[Person], count: int = PROBES) -> list[bytes]:
    """Return second photos of enrolled people and photos of strangers, in turn and in equal numbers."""
    enrolled, rest = everybody[:PEOPLE], everybody[PEOPLE:]
    mated = [person.photos[1] for person in enrolled if len(person.photos) > 1][: count // 2]
    strangers = [person.photos[0] for person in rest][: count // 2]
    return [path.read_bytes() for pair in zip(mated, strangers, strict=True) for path in pair]


def groups(data: Path, count: int = GROUPS) -> list[bytes]:
    """Return insightface's sample photo of six, and photos of WIDER with four to twenty faces, as JPEG files."""
    lines = (data / "wider" / "annotations.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = [a for line in lines if len((a := json.loads(line))["boxes_xyxy"]) in GROUP_FACES][: count - 1]
    sample = package_file("insightface", "data", "images", "t1.jpg").read_bytes()
    return [sample, *(encoded(read(data / "wider" / annotation["file"])) for annotation in chosen)]


def encoded(photo: NDArray[np.uint8]) -> bytes:
    """Return a JPEG file of (H, W, 3) RGB."""
    return cv2.imencode(".jpg", photo[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()


def read(path: Path) -> NDArray[np.uint8]:
    """Return the image as (H, W, 3) RGB."""
    image = cv2.imread(str(path))
    if image is None:
        raise ValueError(f"{path} is no photo")
    return np.ascontiguousarray(image[..., ::-1], np.uint8)


def gallery_of(everybody: Sequence[Person], pack: ModelPack, cache: Path) -> dict[str, Float]:
    """Return a vector of each person's first photo, by name; cached by the recognizer's fingerprint."""
    remembered = cache / f"serving-{pack.recognition.fingerprint()}.npz"
    if remembered.is_file():
        with np.load(remembered) as stored:
            return dict(zip(stored["names"].tolist(), stored["vectors"], strict=True))
    enrolled = everybody[:PEOPLE]
    detector = Detector(open_network(pack.detection, EnginePreference()), pack.detection)
    recognizer = Recognizer(open_network(pack.recognition, EnginePreference()), pack.recognition)
    vectors: dict[str, Float] = {}
    for start in range(0, len(enrolled), BATCH):
        batch = enrolled[start : start + BATCH]
        images = [read(person.photos[0]) for person in batch]
        for person, image, faces in zip(batch, images, detector.detect(images), strict=True):
            if len(faces):
                row = faces.nearest(image.shape[1] / 2, image.shape[0] / 2)
                crop = align(image, faces.landmarks_xy[row : row + 1], recognizer.alignment)
                vectors[person.name] = recognizer.embed(crop)[0]
    cache.mkdir(parents=True, exist_ok=True)
    np.savez(remembered, names=np.array(list(vectors)), vectors=np.stack(list(vectors.values())))
    return vectors
