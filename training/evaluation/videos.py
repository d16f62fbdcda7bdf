"""Benchmarks of videos: YouTube Faces and iQIYI-VID. A video is the mean of the embeddings of its frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float
from models.vision.alignment import Alignment, align
from models.vision.detection import Detector
from models.vision.recognition import l2_normalize
from training.config import ConfigError
from training.data.folders import read_list
from training.data.identities import read_rgb
from training.data.subsampling import evenly_spaced_rows
from training.evaluation.embedding import PHOTO_BATCH_SIZE, Embed, Embeddings, embed_batch
from training.evaluation.lfw import Verification, verify
from training.evaluation.metrics import row_blocks
from training.evaluation.protocols import mean_average_precision, read_video_pairs
from training.progress import track

ALIGNED: Final = "aligned_images_DB"
PARTS: Final = "IQIYI_VID_DATA_Part*"
CLEANED: Final = "gt_v2"


@dataclass(frozen=True)
class VideoEmbedder:
    """Network, the alignment of its crops, and the detector that finds the faces; at most ``frames`` of a video count,
    evenly spaced."""

    embed: Embed
    alignment: Alignment
    detector: Detector
    frames: int
    flip: bool = False

    def embed_all(
        self, videos: Sequence[str], read: Callable[[str], Iterable[NDArray[np.uint8]]], central: bool = False
    ) -> tuple[Float, NDArray[np.bool_]]:
        """Return (V, d) unit vectors of videos, zero without a face, and (V,) whether a face was found. The largest
        face of a frame counts, or the ``central`` one. ``read``: RGB frames of a video."""
        found = [self._embed(read(video), central) for video in track(videos, "embed", "videos")]
        seen = np.array([vector is not None for vector in found], bool)
        if not seen.any():
            raise ConfigError("no video shows a detected face")
        dimension = next(len(vector) for vector in found if vector is not None)
        return np.stack([np.zeros(dimension, np.float32) if v is None else v for v in found]), seen

    def _embed(self, frames: Iterable[NDArray[np.uint8]], central: bool) -> Float | None:
        vectors = []
        rest = iter(frames)
        while batch := list(islice(rest, PHOTO_BATCH_SIZE)):
            crops = []
            for photo, faces in zip(batch, self.detector.detect(batch), strict=True):
                if len(faces):
                    row = faces.nearest(photo.shape[1] / 2, photo.shape[0] / 2) if central else faces.largest()
                    crops.append(align(photo, faces.landmarks_xy[row][None], self.alignment)[0])
            if crops:
                vectors.append(embed_batch(self.embed, np.stack(crops), self.flip))
        return l2_normalize(np.concatenate(vectors).mean(0, keepdims=True))[0] if vectors else None


def evaluate_ytf(embedder: VideoEmbedder, folder: Path) -> Verification:
    """Evaluate on YouTube Faces (L. Wolf et al., CVPR 2011) in the ten folds of ``splits.txt``.

    Frames are those of ``aligned_images_DB/person/video/``, whose face is in the middle. Videos without a detected face
    are similar to nothing. Raises ConfigError if the list or a video is missing or malformed, or no face is found.
    """
    pairs = read_video_pairs(folder / "splits.txt")
    videos = tuple(sorted({*pairs.first, *pairs.second}))
    root = folder / ALIGNED
    if missing := [video for video in videos if not any((root / video).glob("*.jpg"))]:
        raise ConfigError(f"{root} lacks {len(missing)} videos that splits.txt names, first {missing[0]}")
    vectors, seen = embedder.embed_all(videos, lambda video: _ytf_frames(root / video, embedder.frames), central=True)
    return verify(Embeddings(videos, vectors, seen), pairs, intervals=False)


def _ytf_frames(folder: Path, count: int) -> Iterator[NDArray[np.uint8]]:
    files = sorted(folder.glob("*.jpg"), key=lambda file: (len(file.name), file.name))  # by number: 0.9 before 0.10
    return (read_rgb(files[row]) for row in evenly_spaced_rows(len(files), count))


@dataclass(frozen=True)
class VideoRetrieval:
    """MAP of iQIYI-VID in [0, 1], and what it was measured on."""

    mean_average_precision: float
    people: int
    videos: int
    videos_without_face: int


def evaluate_iqiyi(embedder: VideoEmbedder, folder: Path) -> VideoRetrieval:
    """Search the validation videos of iQIYI-VID for each person, by the mean of the person's training videos.

    Y. Liu et al., "iQIYI-VID", 2018. ``folder`` is the root or one ``IQIYI_VID_DATA_Part*`` of it, with videos in
    ``IQIYI_VID_TRAIN/`` and ``IQIYI_VID_VAL/`` of the parts. ``train.txt`` has lines of "video person", ``val.txt``
    "person video video ..."; ``gt_v2/`` with the cleaned lists comes first, and its IQIYI_VID.txt names the videos that
    count. Other videos of IQIYI_VID_VAL are distractors. The largest face of a frame counts. Raises ConfigError if a
    list or video is missing or malformed, or a person has no training video.
    """
    lists = read_iqiyi(folder)
    train, validation = sorted(lists.train), sorted(lists.validation)
    taught, taught_seen = embedder.embed_all(train, lambda name: _video_frames(lists.train[name], embedder.frames))
    vectors, seen = embedder.embed_all(validation, lambda name: _video_frames(lists.validation[name], embedder.frames))
    people = np.array(sorted(set(lists.validation_person.values())), np.int64)
    of_train = np.array([lists.train_person[name] for name in train])
    means = np.stack([taught[(of_train == person) & taught_seen].sum(0) for person in people])
    shown = np.array([lists.validation_person.get(name, -1) for name in validation])
    precisions = []
    for rows in row_blocks(len(people), len(validation)):
        similarity = np.asarray(means[rows] @ vectors.T, np.float64)  # a person's order ignores the length of the mean
        similarity[:, ~seen] = -np.inf
        relevant = people[rows][:, None] == shown
        precisions.append(len(rows) * mean_average_precision(similarity, relevant))
    missed = int((~seen).sum() + (~taught_seen).sum())
    return VideoRetrieval(sum(precisions) / len(people), len(people), len(validation), missed)


@dataclass(frozen=True)
class IqiyiLists:
    """Files of training and validation videos by name, and their person by name; distractors have none."""

    train: Mapping[str, Path]
    validation: Mapping[str, Path]
    train_person: Mapping[str, int]
    validation_person: Mapping[str, int]


def read_iqiyi(folder: Path) -> IqiyiLists:
    """Read the lists of iQIYI-VID and find its videos. Raises as `evaluate_iqiyi`."""
    parts = [folder, *sorted(folder.glob(PARTS))]
    cleaned = folder / CLEANED
    if cleaned.is_dir():
        train_lists, validation_lists, valid = (
            [cleaned / "train_v2.txt"],
            [cleaned / "val_v2.txt"],
            cleaned / "IQIYI_VID.txt",
        )
    else:
        train_lists, validation_lists = (
            [p / name for p in parts if (p / name).is_file()] for name in ("train.txt", "val.txt")
        )
        valid = None
    if not train_lists or not validation_lists:
        raise ConfigError(f"{folder} and its {PARTS} have no train.txt and val.txt, and there is no {CLEANED}")
    train_person = {row[0]: _person(row[1], path) for path, row in _rows(train_lists, 2)}
    validation_person = {name: _person(row[0], path) for path, row in _rows(validation_lists, 2) for name in row[1:]}
    if unknown := set(validation_person.values()) - set(train_person.values()):
        raise ConfigError(f"{folder}: person {min(unknown)} of the validation list has no training video")
    train, validation = (
        {file.name: file for part in parts for file in (part / name).glob("*.mp4")}
        for name in ("IQIYI_VID_TRAIN", "IQIYI_VID_VAL")
    )
    for listed, files in ((train_person, train), (validation_person, validation)):
        if missing := sorted(listed.keys() - files.keys()):
            raise ConfigError(f"{folder} lacks {len(missing)} listed videos, first {missing[0]}")
    if valid is not None:
        names = {row[0] for _, row in _rows([valid], 1)}
        validation = {name: file for name, file in validation.items() if name in names}
        validation_person = {name: person for name, person in validation_person.items() if name in names}
    return IqiyiLists({name: train[name] for name in train_person}, validation, train_person, validation_person)


def _rows(paths: Sequence[Path], fields: int) -> Iterator[tuple[Path, list[str]]]:
    """Yield the fields of each line with its file. Raises ConfigError if a file is missing or a line is short."""
    for path in paths:
        for number, line in enumerate(read_list(path).splitlines(), 1):
            row = line.split()
            if row and len(row) < fields:
                raise ConfigError(f"{path}, line {number} has fewer than {fields} fields")
            if row:
                yield path, row


def _person(text: str, path: Path) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{path}: {text!r} is not the number of a person")
    return int(text)


def _video_frames(path: Path, count: int) -> Iterator[NDArray[np.uint8]]:
    """Yield at most ``count`` evenly spaced RGB frames. Raises ConfigError if the file is no video."""
    video = cv2.VideoCapture(str(path))
    try:
        total = int(video.get(cv2.CAP_PROP_FRAME_COUNT)) if video.isOpened() else 0
        if total < 1:
            raise ConfigError(f"{path} cannot be read as a video. Copy it again")
        chosen = set(evenly_spaced_rows(total, count).tolist())
        for number in range(total):
            if not video.grab():  # a header may count more frames than there are
                return
            if number in chosen:
                read, frame = video.retrieve()
                if read:
                    yield np.asarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), np.uint8)
    finally:
        video.release()
