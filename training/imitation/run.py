"""Imitation of a published recognizer, from photos to the weights of a student."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Final

import numpy as np
import torch

from models.pack.manifest import ModelPack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector
from training.backbones import BottleneckNet
from training.backbones.bottleneck_net import SIDE_PX
from training.config import ConfigError
from training.data.folders import photos_below
from training.imitation.blocks import BlockFit, fit_blocks
from training.imitation.teacher import Teacher
from training.imitation.views import Portraits, read_portraits

log = logging.getLogger(__name__)
BLOCK_FITS: Final = (
    BlockFit(blocks=6, steps=10_000, views=8_000, weight_decay=0.1),
    BlockFit(blocks=7, steps=22_000, views=32_000, weight_decay=0.3),
    BlockFit(blocks=4, steps=30_000, views=32_000, weight_decay=0.3),
)
"""Stem and first five bottlenecks, whose maps are large; those of 16 and of 8 cells, and the head."""
HELD_OUT: Final = 1000
CROPS: Final = "portraits.npy"
TURNS: Final = "turns.npy"


def imitate(
    photos: Path,
    teacher: ModelPack,
    output: Path,
    exclude: Collection[str] = (),
    fits: tuple[BlockFit, ...] = BLOCK_FITS,
    held_out: int = HELD_OUT,
    seed: int = 0,
) -> BottleneckNet:
    """Train the bundled recognizer's network to compute what the recognizer of a pack computes.

    Args:
        photos: folder of portraits without names.
        teacher: pack of a network with the student's blocks, on crops of 128 pixels, and of the detector that finds the
            faces.
        exclude: names of photos, relative to the folder, that are left out.
        fits: settings of the blocks, in their order.
        held_out: number of photos to measure on instead of learning from.

    Raises:
        ConfigError: the pack has other crops, or there are too few photos.
        ModelError: the teacher's network has other blocks.
    """
    spec = teacher.recognition
    if spec.alignment.size_px != SIDE_PX:
        raise ConfigError(f"{teacher.model_id} has crops of {spec.alignment.size_px} pixels. A teacher needs {SIDE_PX}")
    network = Teacher(spec.path)
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    student = BottleneckNet(spec.dimension)
    found = _load_portraits(photos, teacher, output, exclude)
    if len(found.turns) <= held_out:
        raise ConfigError(f"{photos} has {len(found.turns)} photos with a face; {held_out} are held out. Add photos")
    order = np.random.default_rng(seed).permutation(len(found.turns))
    test, train = (found.select(np.sort(rows)) for rows in (order[:held_out], order[held_out:]))
    fit_blocks(student, network, train, test, spec.alignment, fits, output, seed)
    return student


def _load_portraits(photos: Path, pack: ModelPack, output: Path, exclude: Collection[str]) -> Portraits:
    """Cut the portraits of a folder, or read those that were cut before."""
    if not (output / TURNS).exists():
        files = [file for file in photos_below(photos).photos if file.relative_to(photos).as_posix() not in exclude]
        found = read_portraits(
            files, Detector(OnnxNetwork(pack.detection.path), pack.detection), pack.recognition.alignment
        )
        np.save(output / CROPS, found.crops)
        np.save(output / TURNS, found.turns)
        log.info("%d of %d photos have a face", len(found.turns), len(files))
    return Portraits(np.load(output / CROPS, mmap_mode="r"), np.load(output / TURNS))
