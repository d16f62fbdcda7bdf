"""Measure detection and recognition of sideways and upside-down photos at the details low and medium.

``python -m bench.orientation`` prints a Markdown page. The photos are every 20th of LFW and the validation photos of
WIDER FACE, rotated by quarter turns, and the noise and textures in which the model card counts false alarms. The scores
from which a photo counts as upright were chosen on other photos of LFW.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.common import outside
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import align
from models.vision.detection import Detector, Faces
from models.vision.recognition import Recognizer
from models.vision.specs import Normalization
from training.data.identities import read_rgb
from training.detection.photos import load_annotated
from training.evaluation.detection import (
    SYNTHETIC_IMAGES,
    UPSIDE_DOWN_INTERVAL,
    noise,
    read_reference_faces,
    textures,
)

MAX_ERROR: Final = 0.1
"""Largest mean distance, in eye distances, of landmarks that agree with those of the upright photo."""
HEADER: Final = """| Rotated by | Orientations tried | Found | Landmarks agree | Cosine, median | Cosine, 5 % |
|---|---|---|---|---|---|"""
ABOUT: Final = f"""Bundled recognizer. Detail low tries one orientation. Detail medium tries four if the first has no
confident face; "mean" is their mean number. Landmarks agree if they are within {MAX_ERROR} eye distances of the upright
photo's. The cosine compares the embeddings of rotated and upright photo; it is 0 without a face."""

Image = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Orientations:
    """Faces of one photo as detected in each of four orientations, in pixels of the photo.

    ``chosen`` has, by the orientation in which the photo is sent, the one that is kept and the number of tries.
    """

    faces: list[Faces]
    chosen: list[tuple[int, int]]


def detect(detector: Detector, image: Image) -> Orientations:
    upright = detector.prepare(image)
    photos = [upright, *(detector.rotated(upright, turns) for turns in (1, 2, 3))]
    outputs = detector.run(photos)
    scores = [detector.best_score(each) for each in outputs]
    chosen = []
    for turns in range(4):
        if scores[turns] >= detector.confident_score:
            chosen.append((turns, 1))
        else:
            best = int(np.argmax(scores))
            chosen.append((best if scores[best] >= detector.confident_score else turns, 4))
    return Orientations([detector.decode_faces(*each) for each in zip(photos, outputs, strict=True)], chosen)


def compare(image: Image, found: Orientations, recognizer: Recognizer) -> list[tuple[bool, bool, float]]:
    """Return, by orientation, whether a face was found, whether its landmarks agree, and the cosine to the upright."""
    expected = found.faces[0].landmarks_xy[0]
    outcomes = []
    for faces in found.faces:
        if not len(faces):
            outcomes.append((False, False, 0.0))
            continue
        distances = np.linalg.norm(faces.landmarks_xy.mean(1) - expected.mean(0), axis=1)
        points = faces.landmarks_xy[distances.argmin()]
        error = np.linalg.norm(points - expected, axis=1).mean() / np.linalg.norm(expected[1] - expected[0])
        one, other = recognizer.embed(align(image, np.stack([expected, points]), recognizer.alignment))
        outcomes.append((True, bool(error <= MAX_ERROR), float(one @ other)))
    return outcomes


def measure(detector: Detector, recognizer: Recognizer, images: Iterable[Image]) -> Iterator[str]:
    """Yield the rows of the table. Each image must have a face."""
    found = [(image, detect(detector, image)) for image in images]
    outcomes = np.array([compare(image, each, recognizer) for image, each in found])
    chosen = np.array([each.chosen for _, each in found])
    for turns in range(4):
        tried = f"mean {chosen[:, turns, 1].mean():.3f}"
        kept = outcomes[np.arange(len(found)), chosen[:, turns, 0]]
        for name, values in (("1", outcomes[:, turns]), (tried, kept)):
            low, median = np.quantile(values[:, 2], [0.05, 0.5])
            found_share, agreeing = values[:, :2].mean(0)
            yield f"| {90 * turns}° | {name} | {found_share:.1%} | {agreeing:.1%} | {median:.3f} | {low:.3f} |"


def main() -> None:
    data, reference = outside("KITH_DATA", "data"), outside("KITH_REFERENCE", "reference")
    pack, insightface = load_pack(BUNDLED_PACK), load_pack(reference).detection
    yunet = replace(
        insightface,
        path=reference / "detector_yunet.onnx",
        head="yunet",
        normalization=Normalization(0.0, 1.0, "BGR"),
    )
    recognizer = Recognizer(OnnxNetwork(pack.recognition.path), pack.recognition)
    files = [data / "lfw" / "images" / face.file for face in read_reference_faces(data / "lfw" / "landmarks_yunet.csv")]
    sample = [files[i] for i in np.linspace(0, len(files) - 1, SYNTHETIC_IMAGES).astype(int)]
    photos = {
        "LFW": [read_rgb(file) for file in files[::UPSIDE_DOWN_INTERVAL]],
        "WIDER FACE": [photo.image for photo in load_annotated(data / "wider", "val")],
    }
    faceless = {
        "noise": list(noise(SYNTHETIC_IMAGES, np.random.default_rng(0))),
        "textures": list(textures(sample, np.random.default_rng(1))),
    }
    print(f"# Rotated photos\n\n{ABOUT}")
    for name, spec in (("kith-compact", pack.detection), ("SCRFD-500M", insightface), ("YuNet", yunet)):
        detector = Detector(OnnxNetwork(spec.path), spec)
        for what, images in photos.items():
            print(f"\n## {name}, {len(images)} photos of {what}\n\n{HEADER}", flush=True)
            print("\n".join(measure(detector, recognizer, images)), end="\n\n", flush=True)
        for what, images in faceless.items():
            found = [detect(detector, image) for image in images]
            once = sum(len(each.faces[0]) > 0 for each in found)
            tried = sum(len(each.faces[each.chosen[0][0]]) > 0 for each in found)
            print(f"False alarms in {len(images)} images of {what}: {once}, and {tried} in four orientations.")


if __name__ == "__main__":
    main()
