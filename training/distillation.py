"""Learning from a teacher's embeddings: any pack, any ONNX network or exported torch program, any finished run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.alignment import recut
from models.errors import ModelError
from models.pack import Normalisation, load_pack
from models.recognition import Recogniser, unit
from models.runtime import Network
from training.backbones import build_backbone
from training.config import ConfigError, DistillConfig
from training.losses.core import wide
from training.runs import CHECKPOINT, CONFIG, averaged_weights, read_run

Teacher = Callable[[Tensor], Tensor]
"""(B, 3, 112, 112) crops in [-1, 1], RGB, to (B, D) unit embeddings without gradient."""


def load_teacher(path: Path) -> Teacher:
    """A run directory (its averaged weights); a pack or directory of ONNX files, fed as it declares; or one file, ONNX
    or torch.export's .pt2, fed with (B, 3, 112, 112) RGB crops in [-1, 1].

    Raises:
        ConfigError: nothing there can teach.
    """
    if (path / CONFIG).is_file():
        config = read_run(path)
        backbone = build_backbone(config.backbone)
        backbone.load_state_dict(averaged_weights(path / CHECKPOINT))
        return _torch_teacher(backbone.eval())
    if path.suffix == ".pt2":
        return _torch_teacher(torch.export.load(path).module())
    try:
        if path.suffix == ".onnx":
            return _onnx_teacher(Network(path), Normalisation(127.5, 127.5))
        spec = load_pack(path).recognition
        recogniser = Recogniser(Network(spec.path), spec)
    except ModelError as error:
        raise ConfigError(f"distill.teacher {path}: {error}") from error

    def embed(images_BCHW: Tensor) -> Tensor:
        crops = recut(_pixels(images_BCHW), recogniser.alignment)
        return torch.from_numpy(recogniser.embed(crops)).to(images_BCHW.device)

    return embed


def _torch_teacher(backbone: nn.Module) -> Teacher:
    @torch.no_grad()
    def embed(images_BCHW: Tensor) -> Tensor:
        return F.normalize(wide(backbone.to(images_BCHW.device)(images_BCHW)))

    return embed


def _onnx_teacher(network: Network, normalisation: Normalisation) -> Teacher:
    def embed(images_BCHW: Tensor) -> Tensor:
        pixels = _pixels(images_BCHW).transpose(0, 3, 1, 2).astype(np.float32)
        vectors = network.run((pixels - normalisation.mean) / normalisation.std)[0]
        return torch.from_numpy(unit(vectors.reshape(len(vectors), -1))).to(images_BCHW.device)

    return embed


def _pixels(images_BCHW: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    values = (images_BCHW.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    return values.permute(0, 2, 3, 1).cpu().numpy()


class Distillation(nn.Module):
    """How far the student is from the teacher, the student's embedding projected linearly where dimensions differ.

    By ``config.match``: mean(1 - cos(student, teacher)), or mean((student - scale * teacher)^2) over images and
    coordinates. The latter is for networks that learned distances, dlib's for one: all their faces lie in a narrow cone,
    where cosines hardly differ and most of an embedding is what every face shares. What the teacher said of batches that
    will recur is kept: 4 bytes a coordinate.
    """

    def __init__(self, teacher: Teacher, student_dim: int, config: DistillConfig) -> None:
        super().__init__()
        self.teacher, self.config = teacher, config
        teacher_dim = teacher(torch.zeros(1, 3, 112, 112)).shape[1]
        self.projection: nn.Module = (
            nn.Identity() if teacher_dim == student_dim else nn.Linear(student_dim, teacher_dim, bias=False)
        )
        self._said: dict[int, Tensor] = {}

    def forward(self, embeddings_BD: Tensor, images_BCHW: Tensor, batch: int | None = None) -> Tensor:
        """``batch``: a number that these very images, and no others, come under."""
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            wanted_BD = self._ask(images_BCHW, batch)
            given_BD = self.projection(wide(embeddings_BD))
            match self.config.match:
                case "cosine":
                    return (1 - F.cosine_similarity(given_BD, wanted_BD)).mean()
                case "euclidean":
                    return F.mse_loss(given_BD, self.config.scale * wanted_BD)

    def _ask(self, images_BCHW: Tensor, batch: int | None) -> Tensor:
        if not self.config.views or batch is None:
            return self.teacher(images_BCHW)
        if batch not in self._said:
            self._said[batch] = self.teacher(images_BCHW)
        return self._said[batch]
