"""Distillation from a teacher's embeddings: packs, ONNX networks, exported torch programs, finished runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.engines.selection import open_fp32
from models.errors import ModelError
from models.pack.loading import load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import CROP_SIZE_PX, realign_crops, standard_alignment
from models.vision.recognition import Recognizer
from models.vision.specs import Normalization, RecognitionSpec
from training.config import ConfigError, DistillConfig
from training.losses.core import upcast
from training.optimization.run_folder import CONFIG, load_run

Teacher = Callable[[Tensor], Tensor]
"""Function from (B, 3, s, s) RGB crops in [-1, 1] of any size to (B, D) unit embeddings, without gradient."""


def load_teacher(path: Path) -> Teacher:
    """Load a teacher from a run, a pack, a directory of ONNX files, or one ONNX or .pt2 file.

    Runs use their EMA weights. Packs are fed as their manifest declares. Single files get RGB crops in [-1, 1]: ONNX
    files of their input's size, .pt2 files of 112x112. Crops of another size than the teacher's are scaled. Raises
    ConfigError if the path holds no usable teacher.
    """
    if (path / CONFIG).is_file():
        config, backbone = load_run(path)
        return _torch_teacher(backbone, config.data.crop_px)
    if path.suffix == ".pt2":
        return _torch_teacher(torch.export.load(path).module(), CROP_SIZE_PX)
    try:
        recognizer = load_recognizer(path)
    except ModelError as error:
        raise ConfigError(f"distill.teacher {path}: {error}") from error

    def embed(images_BCHW: Tensor) -> Tensor:
        vectors = recognizer.embed(realign_crops(_to_uint8(images_BCHW), recognizer.alignment))
        return torch.from_numpy(vectors).to(images_BCHW.device)

    return embed


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


def _torch_teacher(backbone: nn.Module, side_px: int) -> Teacher:
    @torch.no_grad()
    def embed(images_BCHW: Tensor) -> Tensor:
        if images_BCHW.shape[-1] != side_px:
            images_BCHW = F.interpolate(images_BCHW, (side_px, side_px), mode="bilinear", antialias=True)
        return F.normalize(upcast(backbone.to(images_BCHW.device)(images_BCHW)))

    return embed


def _to_uint8(images_BCHW: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    values = (images_BCHW.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    return values.permute(0, 2, 3, 1).cpu().numpy()


class Distillation(nn.Module):
    """Mean of 1 - cos(student, teacher), with a linear projection if dimensions differ."""

    def __init__(self, teacher: Teacher, student_dim: int, config: DistillConfig) -> None:
        super().__init__()
        self.teacher, self.config = teacher, config
        teacher_dim = teacher(torch.zeros(1, 3, CROP_SIZE_PX, CROP_SIZE_PX)).shape[1]
        same = teacher_dim == student_dim
        self.projection = nn.Identity() if same else nn.Linear(student_dim, teacher_dim, bias=False)

    def forward(self, embeddings_BD: Tensor, images_BCHW: Tensor) -> Tensor:
        """Return the loss."""
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            target_BD = self._teacher_embeddings(images_BCHW)
            return (1 - F.cosine_similarity(self.projection(upcast(embeddings_BD)), target_BD)).mean()

    def _teacher_embeddings(self, images_BCHW: Tensor) -> Tensor:
        taught_BD = self.teacher(images_BCHW)
        return F.normalize(taught_BD + self.teacher(images_BCHW.flip(3))) if self.config.mirror else taught_BD
