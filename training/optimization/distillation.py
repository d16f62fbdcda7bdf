"""Distillation from a teacher's embeddings: packs, ONNX networks, exported torch programs, finished runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from models.errors import ModelError
from models.pack.loading import load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import (
    CROP_SIZE_PX,
    STANDARD_ALIGNMENT,
    TEMPLATE_XY,
    Alignment,
    realign_crops,
    similarity_transforms,
)
from models.vision.pixels import to_planes
from models.vision.specs import Normalization
from training import distributed
from training.backbones import ChipResNet, build_backbone
from training.backbones.chip_resnet import LAST_BLOCKS
from training.config import ConfigError, DistillConfig
from training.losses.core import upcast
from training.optimization.onnx_module import OnnxModule, is_convolutional
from training.optimization.run_folder import CHECKPOINT, CONFIG, load_ema_weights, read_run_config

MEASURED_BATCH: Final = 100
"""Held-out images embedded at a time."""
Teacher = Callable[[Tensor], Tensor]
"""Function from (B, 3, 112, 112) RGB crops in [-1, 1] to (B, D) unit embeddings, without gradient."""


def load_teacher(path: Path) -> Teacher:
    """Load a teacher from a run, a pack, a directory of ONNX files, or one ONNX or .pt2 file.

    Runs use their EMA weights. Packs are fed as their manifest declares. Single files get (B, 3, 112, 112) RGB crops in
    [-1, 1]. Raises ConfigError if the path holds no usable teacher.
    """
    if (path / CONFIG).is_file():
        config = read_run_config(path)
        backbone = build_backbone(config.backbone)
        backbone.load_state_dict(load_ema_weights(path / CHECKPOINT))
        return _torch_teacher(backbone.eval())
    if path.suffix == ".pt2":
        return _torch_teacher(torch.export.load(path).module())
    try:
        if path.suffix == ".onnx":
            return _onnx_teacher(path, Normalization(127.5, 127.5), STANDARD_ALIGNMENT)
        spec = load_pack(path).recognition
        if is_convolutional(spec.path):
            return ResidualTeacher(OnnxModule(spec.path), spec.normalization, spec.alignment)
        return _onnx_teacher(spec.path, spec.normalization, spec.alignment)
    except ModelError as error:
        raise ConfigError(f"distill.teacher {path}: {error}") from error


class ResidualTeacher(nn.Module):
    """Pack's residual recognizer on the student's device, which also shows the maps of its blocks."""

    to_crop: Tensor

    def __init__(self, network: OnnxModule, normalization: Normalization, alignment: Alignment) -> None:
        super().__init__()
        self.network, self._normalization = network.requires_grad_(False), normalization
        (matrix,) = similarity_transforms(TEMPLATE_XY[None], alignment)
        self.size_px = alignment.size_px
        sampling = torch.from_numpy(_sampling_matrix(matrix, alignment.size_px)).float()
        self.register_buffer("to_crop", sampling, persistent=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return (B, D) unit embeddings of (B, 3, 112, 112) RGB crops in [-1, 1]."""
        return self.embed_with_maps(images_BCHW)[0]

    @torch.no_grad()
    def embed_with_maps(self, images_BCHW: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return unit embeddings, and the maps before the first block and after each block."""
        grid = F.affine_grid(
            self.to_crop.expand(len(images_BCHW), 2, 3),
            [len(images_BCHW), 3, self.size_px, self.size_px],
            align_corners=False,
        )
        crops = F.grid_sample(images_BCHW, grid, padding_mode="border", align_corners=False)
        pixels = (crops * 127.5 + 127.5 - self._normalization.mean) / self._normalization.std
        if self._normalization.color == "BGR":
            pixels = pixels.flip(1)
        device = images_BCHW.device.type
        with torch.autocast(device, torch.bfloat16, enabled=distributed.has_native_bf16()):
            vectors, maps = self.network(pixels.contiguous(memory_format=torch.channels_last))
        return F.normalize(vectors.float()), maps


def _sampling_matrix(matrix: NDArray[np.float64], size_px: int) -> NDArray[np.float64]:
    """Convert a (2, 3) matrix, from pixels of the standard crop to those of the teacher's, to that of `affine_grid`.

    The latter maps back, in units in which the outer edges are -1 and 1.
    """
    to_standard = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))
    edges, centers = size_px / 2, (size_px - 1) / 2
    pixels = np.array([[edges, 0, centers], [0, edges, centers], [0, 0, 1]])
    units = np.array([[2, 0, 1 - CROP_SIZE_PX], [0, 2, 1 - CROP_SIZE_PX], [0, 0, CROP_SIZE_PX]]) / CROP_SIZE_PX
    sampled: NDArray[np.float64] = (units @ to_standard @ pixels)[:2]
    return sampled


def _torch_teacher(backbone: nn.Module) -> Teacher:
    @torch.no_grad()
    def embed(images_BCHW: Tensor) -> Tensor:
        return F.normalize(upcast(backbone.to(images_BCHW.device)(images_BCHW)))

    return embed


def _onnx_teacher(path: Path, normalization: Normalization, alignment: Alignment) -> Teacher:
    network = OnnxNetwork(path)

    @torch.no_grad()
    def embed(images_BCHW: Tensor) -> Tensor:
        crops = realign_crops(_to_uint8(images_BCHW), alignment)
        planes = to_planes(crops, normalization, np.empty((len(crops), 3, *crops.shape[1:3]), np.float32))
        vectors = torch.from_numpy(network.run(planes)[0]).to(images_BCHW.device)
        return F.normalize(vectors.float().flatten(1))

    return embed


def _to_uint8(images_BCHW: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    values = (images_BCHW.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    return values.permute(0, 2, 3, 1).cpu().numpy()


class Distillation(nn.Module):
    """Distance between student and teacher embeddings, with a linear projection if dimensions differ.

    ``config.match`` selects mean(1 - cos(student, teacher)), or mean((student - scale * teacher)^2) over images and
    coordinates. The latter suits teachers that learned distances, such as dlib's: their vectors lie in a narrow cone,
    where cosines hardly differ. With ``config.views``, teacher embeddings are cached: 4 bytes per coordinate.
    """

    def __init__(self, teacher: Teacher, student_dim: int, config: DistillConfig) -> None:
        super().__init__()
        self.teacher, self.config = teacher, config
        teacher_dim = teacher(torch.zeros(1, 3, 112, 112)).shape[1]
        self.projection: nn.Module = (
            nn.Identity() if teacher_dim == student_dim else nn.Linear(student_dim, teacher_dim, bias=False)
        )
        self._cache: dict[int, Tensor] = {}

    def forward(self, embeddings_BD: Tensor, images_BCHW: Tensor, batch: int | None = None) -> Tensor:
        """Return the loss. ``batch`` is a number that identifies these images."""
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            target_BD = self._teacher_embeddings(images_BCHW, batch)
            return self._loss(embeddings_BD, target_BD)

    def _loss(self, embeddings_BD: Tensor, target_BD: Tensor) -> Tensor:
        projected_BD = self.projection(upcast(embeddings_BD))
        match self.config.match:
            case "cosine":
                return (1 - F.cosine_similarity(projected_BD, target_BD)).mean()
            case "euclidean":
                return F.mse_loss(projected_BD, self.config.scale * target_BD)

    def imitate_blocks(self, student: ChipResNet, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings of the teacher's last map, and the mean loss of stem, blocks and head.

        Every part gets the teacher's own map and is compared with the teacher's next one, in units of its variance. So
        all parts learn at once, and no gradient crosses them (A. Romero et al., "FitNets: Hints for Thin Deep Nets",
        ICLR 2015, with a hint at every block).
        """
        taught_BD, maps = self._require_maps(images_BCHW)
        given = [student.stem(student.cut_chip(images_BCHW))]
        given += [block(x) for block, x in zip(student.blocks, maps[:-1], strict=True)]
        embeddings_BD = student.head(maps[-1])
        pairs = zip([*given, embeddings_BD], [*maps, self.config.scale * taught_BD], strict=True)
        return embeddings_BD, torch.stack([_relative_error(x, wanted) for x, wanted in pairs]).mean()

    def imitate_stages(self, student: ChipResNet, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the student's embeddings, and their loss plus ``map_weight`` times the mean loss of its stages."""
        taught_BD, maps = self._require_maps(images_BCHW)
        taught_BD = self._with_mirror(taught_BD, images_BCHW)
        own = student.maps(images_BCHW)
        embeddings_BD = student.head(own[-1])
        errors = [_relative_error(own[i], maps[i]) for i in LAST_BLOCKS]
        return embeddings_BD, self._loss(embeddings_BD, taught_BD) + self.config.map_weight * torch.stack(errors).mean()

    def _require_maps(self, images_BCHW: Tensor) -> tuple[Tensor, list[Tensor]]:
        if not isinstance(self.teacher, ResidualTeacher):
            raise ConfigError("distill.block_steps and map_weight need a pack with a plain residual network as teacher")
        return self.teacher.embed_with_maps(images_BCHW)

    @torch.no_grad()
    def measure(self, student: nn.Module, images_BCHW: Tensor) -> float:
        """Return the loss of a network in evaluation mode on images that it was not trained on."""
        parts = [self(student(part), part) * len(part) for part in torch.split(images_BCHW, MEASURED_BATCH)]
        return float(torch.stack(parts).sum()) / len(images_BCHW)

    def _teacher_embeddings(self, images_BCHW: Tensor, batch: int | None) -> Tensor:
        if not self.config.views or batch is None:
            return self._embed(images_BCHW)
        if batch not in self._cache:
            self._cache[batch] = self._embed(images_BCHW)
        return self._cache[batch]

    def _embed(self, images_BCHW: Tensor) -> Tensor:
        return self._with_mirror(self.teacher(images_BCHW), images_BCHW)

    def _with_mirror(self, taught_BD: Tensor, images_BCHW: Tensor) -> Tensor:
        """Return the mean with the embeddings of the mirror images, if they are wanted."""
        return F.normalize(taught_BD + self.teacher(images_BCHW.flip(3))) if self.config.mirror else taught_BD


def _relative_error(x: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean square error in units of the variance of ``wanted``."""
    return F.mse_loss(upcast(x), wanted.float()) / wanted.float().var()
