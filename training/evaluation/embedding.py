"""Embedders made of packs, runs and torch networks, and the face crops they embed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.engines.selection import open_fp32
from models.errors import ModelError
from models.pack.loading import load_pack
from models.pack.manifest import ModelPack
from models.runtime.network import Float
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import (
    CROP_SIZE_PX,
    STANDARD_ALIGNMENT,
    Alignment,
    align,
    realign_crops,
    standard_alignment,
    standard_crop_px,
)
from models.vision.detection import Detector
from models.vision.recognition import Recognizer, l2_normalize
from models.vision.specs import Normalization, RecognitionSpec
from training import distributed
from training.config import ConfigError, DataConfig
from training.data.identities import Choose, IdentitySet, load_identities, read_rgb
from training.evaluation.metrics import Floats, flip_average
from training.optimization.loop import to_tensor
from training.optimization.run_folder import CONFIG, load_run
from training.progress import track

Embed = Callable[[NDArray[np.uint8]], Float]
"""Function from (n, size_px, size_px, 3) uint8 RGB crops to (n, d) l2_normalize vectors."""
Crops = NDArray[np.uint8]
EMBED_BATCH_SIZE: Final = 64
DETECT_BATCH_SIZE = 32
PHOTO_BATCH_SIZE: Final = 8
"""Smaller, since users' photos may be large."""


def torch_embedder(network: nn.Module, normalized: bool = True) -> Callable[[Crops], Float]:
    """Return a function from (n, s, s, 3) uint8 crops to (n, d) vectors of a network, of length 1 if normalized."""

    @torch.no_grad()
    def embed(crops: Crops) -> Float:
        device = next(network.parameters()).device
        parts = [
            network(to_tensor(crops[i : i + 128], device)).float().cpu().numpy()
            for i in range(0, max(1, len(crops)), 128)
        ]
        vectors = np.concatenate(parts)
        return l2_normalize(vectors) if normalized else vectors

    return embed


def shared_embedder(network: nn.Module) -> Embed:
    """Return a `torch_embedder` of which each rank embeds its share of the crops. Collective."""
    embed = torch_embedder(network)

    def share(crops: Crops) -> Float:
        if distributed.world_size() == 1:
            return embed(crops)
        own = distributed.split_evenly(len(crops), distributed.rank(), distributed.world_size())
        vectors = torch.from_numpy(embed(crops[own])).to(distributed.device())
        return distributed.all_gather_parts(vectors, len(crops)).cpu().numpy()

    return share


def teacher_embeddings(teacher: Path, data: IdentitySet) -> torch.Tensor:
    """Return the (n, D) unit embeddings of all images by a teacher, each the mean of the image and its mirror image.
    Each rank embeds its share.

    ``teacher``: run, with its EMA weights; pack, fed as its manifest declares; directory of ONNX; .onnx or .pt2 file,
    which get RGB crops in [-1, 1]. Crops of another size than the teacher's are scaled. Raises ConfigError if the path
    holds no usable teacher.
    """
    try:
        embed, alignment = load_embedder(teacher)
    except ModelError as error:
        raise ConfigError(f"distill.teacher {teacher}: {error}") from error
    own = np.arange(len(data))[distributed.split_evenly(len(data), distributed.rank(), distributed.world_size())]
    vectors = embed_crops(lambda crops: embed(realign_crops(crops, alignment)), data.select(own).crops_NHWC, flip=True)
    return distributed.all_gather_parts(torch.from_numpy(vectors).to(distributed.device()), len(data)).cpu()


def load_embedder(path: Path, normalized: bool = True) -> tuple[Embed, Alignment]:
    """Return the embedder of a run, a pack or an exported recognizer (.onnx), and the alignment of its crops. Only
    those of runs need not have length 1. Raises ModelError if the pack or network cannot be loaded."""
    if (path / CONFIG).is_file():
        config, backbone = load_run(path)
        return torch_embedder(backbone, normalized), standard_alignment(config.data.crop_px)
    if path.suffix == ".pt2":
        return torch_embedder(torch.export.load(path).module().to(distributed.device()), normalized), STANDARD_ALIGNMENT
    recognizer = load_recognizer(path)
    return recognizer.embed, recognizer.alignment


def load_recognizer(path: Path) -> Recognizer:
    """Return the recognizer of a pack, a directory of ONNX files, or an .onnx file as `kith-train export` writes it.
    Raises ModelError if it cannot be loaded."""
    if path.suffix != ".onnx":
        spec = load_pack(path).recognition
        return Recognizer(open_fp32(spec.path), spec)
    network = OnnxNetwork(path)
    side = network.input_shape[-1]
    alignment = standard_alignment(side if isinstance(side, int) else CROP_SIZE_PX)
    (output,) = network.run(np.zeros((1, 3, alignment.size_px, alignment.size_px), np.float32))
    standard = Normalization(127.5, 127.5)
    return Recognizer(network, RecognitionSpec(path, None, standard, alignment, output.size, preprocessing_version=""))


def embed_batch(embed: Embed, crops: Crops, flip: bool = False) -> Float:
    """Embed a batch of crops to (n, d) vectors. ``flip`` averages each with its mirror image, normalized."""
    plain = embed(crops)
    if not flip:
        return plain
    return flip_average(plain, embed(np.ascontiguousarray(crops[:, :, ::-1]))).astype(np.float32)


def embed_crops(embed: Embed, crops_NHWC: NDArray[np.uint8], flip: bool = False) -> Float:
    """Embed crops in batches to (n, d) l2_normalize vectors. ``flip`` averages each with its mirror image."""
    size = EMBED_BATCH_SIZE * distributed.world_size()  # ranks may share a batch
    starts = range(0, len(crops_NHWC), size)
    vectors = [
        embed_batch(embed, np.array(crops_NHWC[start : start + size], order="C"), flip)
        for start in track(starts, "embed", f"batches of {size} crops")
    ]
    return np.concatenate(vectors).astype(np.float32)


def embed_people(
    embed: Embed,
    alignment: Alignment,
    detector: Detector,
    photos: DataConfig,
    cache: Path,
    choose: Choose,
    flip: bool = False,
) -> tuple[IdentitySet, Float]:
    """Return the people of the chosen photos, and the (n, d) vectors of their photos. The largest face of each photo
    counts, aligned for the embedder; aligned photos are standard crops. Raises ConfigError as `load_identities` does,
    or if no two people have a face."""
    side = standard_crop_px(alignment) if photos.aligned else alignment.size_px
    data = load_identities(replace(photos, crop_px=side), cache, detector, choose, alignment).without_empty_classes()
    if data.num_classes < 2:
        raise ConfigError(f"{photos.root}: fewer than two people have a photo with a face")

    def embed_fitted(crops: Crops) -> Float:
        return embed(realign_crops(crops, alignment) if photos.aligned else crops)

    return data, embed_crops(embed_fitted, data.crops_NHWC, flip)


def central_crops(
    detector: Detector, files: Sequence[Path], alignment: Alignment
) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
    """Yield batches of rows of ``files`` with a detected face, and the (b, size_px, size_px, 3) crops of the face
    nearest the center."""
    for start in track(range(0, len(files), DETECT_BATCH_SIZE), "detect", f"batches of {DETECT_BATCH_SIZE} photos"):
        photos = [read_rgb(file) for file in files[start : start + DETECT_BATCH_SIZE]]
        rows, crops = [], []
        for row, (photo, faces) in enumerate(zip(photos, detector.detect(photos), strict=True), start):
            if len(faces):
                central = faces.nearest(photo.shape[1] / 2, photo.shape[0] / 2)
                rows.append(row)
                crops.append(align(photo, faces.landmarks_xy[central][None], alignment)[0])
        if rows:
            yield rows, np.stack(crops)


def given_crops(
    files: Sequence[Path], landmarks_xy: Floats, alignment: Alignment
) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
    """Yield batches of rows of ``files`` and their crops by given (n, 5, 2) landmarks."""
    for start in track(range(0, len(files), DETECT_BATCH_SIZE), "align", f"batches of {DETECT_BATCH_SIZE} photos"):
        rows = list(range(start, min(start + DETECT_BATCH_SIZE, len(files))))
        crops = [align(read_rgb(files[row]), landmarks_xy[row : row + 1], alignment)[0] for row in rows]
        yield rows, np.stack(crops)


@dataclass(frozen=True)
class Pairs:
    """Pairs of photos, relative to the images folder: (P,) whether they show the same person, and (P,) fold."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    same: NDArray[np.bool_]
    folds: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Embeddings of photos by file name.

    Attributes:
        vectors: (n, d) l2_normalize vectors; zero, and so similar to nothing, for photos without a face.
        found: (n,) whether a face was found.
    """

    files: tuple[str, ...]
    vectors: Float
    found: NDArray[np.bool_]

    def rows(self, files: Sequence[str]) -> NDArray[np.intp]:
        row = {file: i for i, file in enumerate(self.files)}
        return np.array([row[file] for file in files], np.intp)

    def similarities(self, pairs: Pairs) -> Floats:
        """Return (P,) cosines of the pairs."""
        a, b = self.vectors[self.rows(pairs.first)], self.vectors[self.rows(pairs.second)]
        return np.asarray(np.einsum("nd,nd->n", a, b, dtype=np.float64))


class Embedder:
    """Detector and recognizer of a pack, as a function from photos to l2_normalize vectors."""

    def __init__(self, pack: ModelPack) -> None:
        self.detector = Detector(OnnxNetwork(pack.detection.path), pack.detection)
        self.recognizer = Recognizer(open_fp32(pack.recognition.path), pack.recognition)

    def embed(self, files: Sequence[Path]) -> tuple[Float, NDArray[np.bool_]]:
        """Embed the central face of each photo.

        Returns:
            (n, d) l2_normalize vectors, zero for photos without a face, and (n,) whether a face was found.
        """
        vectors = np.zeros((len(files), self.recognizer.dimension), np.float32)
        found = np.zeros(len(files), bool)
        for rows, crops in central_crops(self.detector, files, self.recognizer.alignment):
            vectors[rows] = self.recognizer.embed(crops)
            found[rows] = True
        return vectors, found
