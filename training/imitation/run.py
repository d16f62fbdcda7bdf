"""Imitation of a published recognizer, from photos to the weights of a student."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from models.pack.loading import load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector
from models.vision.specs import DetectionSpec
from training import distributed
from training.backbones import BottleneckNet
from training.backbones.bottleneck_net import SIDE_PX
from training.config import ConfigError, RunConfig
from training.data.folders import photos_below
from training.data.identities import is_excluded, read_excluded
from training.imitation.blocks import BlockFit, fit_blocks
from training.imitation.joint import JointFit, fit_student
from training.imitation.teacher import Teacher, TorchTeacher
from training.imitation.views import Portraits, cut_portraits
from training.optimization.run_folder import write_run_config

BLOCK_FITS: Final = (
    BlockFit(blocks=6, steps=10_000, views=8_000, weight_decay=0.1),
    BlockFit(blocks=7, steps=22_000, views=32_000, weight_decay=0.3),
    BlockFit(blocks=4, steps=30_000, views=32_000, weight_decay=0.3),
)
"""Stem and first five bottlenecks, whose maps are large; those of 16 and of 8 cells, and the head."""
JOINT_FIT: Final = JointFit(steps=7_000)
GPU_JOINT_FIT: Final = JointFit(steps=8_400, batch_size=128, muon_rate=3e-3, adam_rate=5e-4, workers=16, compiled=False)
"""Settings of the H100 run in training/imitation/README.md, which was cut off at step 7,000."""
CROPS: Final = "portraits.npy"
DETECTED: Final = "detected.npy"


def imitate(
    config: RunConfig,
    served: DetectionSpec,
    blocks: tuple[BlockFit, ...] = BLOCK_FITS,
    joint: JointFit | None = None,
) -> BottleneckNet:
    """Train or resume the bundled recognizer's network, so that it computes what the recognizer of a pack computes.
    Raises ConfigError: the pack has other crops, there are too few photos, or the run was started with other settings.
    ModelError: the teacher's network has other blocks.

    Args:
        config: the recipe `training.recipes.imitated`. Its teacher is a pack with a network of the student's blocks, on
            crops of 128 pixels, and with the detector whose landmarks align the teacher's crops.
        served: detector that the student will be served with. Its landmarks align the student's crops.
    """
    assert config.distill.teacher is not None  # noqa: S101  # by the recipe
    pack, seed = load_pack(config.distill.teacher), config.loop.seed
    spec = pack.recognition
    if spec.alignment.size_px != SIDE_PX:
        raise ConfigError(f"{pack.model_id} has crops of {spec.alignment.size_px} pixels. A teacher needs {SIDE_PX}")
    teacher = Teacher(spec)
    crops, detected = config.output / CROPS, config.output / DETECTED
    write_run_config(config.output, config.as_dict(), detected, mutable=("root", "output"))
    if not crops.exists():
        excluded = read_excluded(config.data.root, config.data.exclude)
        files = [file for file in photos_below(config.data.root).photos if not is_excluded(file, excluded)]
        true, own = (Detector(OnnxNetwork(detection.path), detection) for detection in (pack.detection, served))
        cut_portraits(files, true, own, spec.alignment, crops, detected)
    portraits = Portraits(np.load(crops, mmap_mode="r"), np.load(detected))
    found, held_out = portraits.found, config.distill.held_out
    if len(found) <= held_out:
        raise ConfigError(
            f"{config.data.root} has {len(found)} photos with a face; {held_out} are held out. Add photos"
        )
    order = np.random.default_rng(seed).permutation(found)
    test, train = (portraits.select(np.sort(rows)) for rows in (order[:held_out], order[held_out:]))
    torch.manual_seed(seed)
    student = BottleneckNet(spec.dimension)
    fit_blocks(student, teacher, train, test, blocks, config.output, seed)
    device = distributed.device()
    if device.type == "cpu":
        fit_student(student, teacher, train, test, joint or JOINT_FIT, config.output, seed)
    else:
        fit_student(student, TorchTeacher(spec, device), train, test, joint or GPU_JOINT_FIT, config.output, seed)
    return student
