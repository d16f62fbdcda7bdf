"""Imitation of a published recognizer, from photos to the weights of a student."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
import torch

from models.checksums import sha256_of
from models.pack.manifest import ModelPack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector
from training.backbones import BottleneckNet
from training.backbones.bottleneck_net import SIDE_PX
from training.config import ConfigError
from training.data.folders import photos_below
from training.imitation.blocks import BlockFit, fit_blocks
from training.imitation.teacher import Teacher
from training.imitation.views import Portraits, cut_portraits
from training.optimization.run_folder import write_run_config

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
        ConfigError: the pack has other crops, there are too few photos, or ``output`` has a run with other settings.
        ModelError: the teacher's network has other blocks.
    """
    spec = teacher.recognition
    if spec.alignment.size_px != SIDE_PX:
        raise ConfigError(f"{teacher.model_id} has crops of {spec.alignment.size_px} pixels. A teacher needs {SIDE_PX}")
    network = Teacher(spec)
    settings = {
        "photos": photos.name,
        "excluded": len(exclude),
        "teacher": spec.fingerprint(),
        "detector": sha256_of(teacher.detection.path),
        "fits": [asdict(fit) for fit in fits],
        "held_out": held_out,
        "seed": seed,
    }
    crops, turns = output / CROPS, output / TURNS
    write_run_config(output, settings, turns, mutable=())
    if not crops.exists():
        files = [file for file in photos_below(photos).photos if file.relative_to(photos).as_posix() not in exclude]
        detector = Detector(OnnxNetwork(teacher.detection.path), teacher.detection)
        cut_portraits(files, detector, spec.alignment, crops, turns)
    portraits = Portraits(np.load(crops, mmap_mode="r"), np.load(turns))
    found = np.flatnonzero(np.isfinite(portraits.turns))
    if len(found) <= held_out:
        raise ConfigError(f"{photos} has {len(found)} photos with a face; {held_out} are held out. Add photos")
    order = np.random.default_rng(seed).permutation(found)
    test, train = (portraits.select(np.sort(rows)) for rows in (order[:held_out], order[held_out:]))
    torch.manual_seed(seed)
    student = BottleneckNet(spec.dimension)
    fit_blocks(student, network, train, test, fits, output, seed)
    return student
