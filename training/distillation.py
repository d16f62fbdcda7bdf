"""Learning from a teacher's embeddings: any pack, any ONNX network or exported torch program, any finished run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.alignment import STANDARD, Alignment, recut
from models.errors import ModelError
from models.pack import Normalisation, load_pack
from models.runtime import OnnxNetwork
from training import distributed
from training.backbones import build_backbone
from training.config import ConfigError, DistillConfig
from training.losses.core import wide
from training.onnx_program import OnnxProgram, UnsupportedOperatorError
from training.run_folder import CHECKPOINT, CONFIG, averaged_weights, read_run

log = logging.getLogger(__name__)
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
            return _onnx_teacher(path, Normalisation(127.5, 127.5), STANDARD)
        spec = load_pack(path).recognition
        return _onnx_teacher(spec.path, spec.normalisation, spec.alignment)
    except ModelError as error:
        raise ConfigError(f"distill.teacher {path}: {error}") from error


def _torch_teacher(backbone: nn.Module) -> Teacher:
    @torch.no_grad()
    def embed(images_BCHW: Tensor) -> Tensor:
        return F.normalize(wide(backbone.to(images_BCHW.device)(images_BCHW)))

    return embed


def _onnx_teacher(path: Path, normalisation: Normalisation, alignment: Alignment) -> Teacher:
    """By torch where it knows the operators, in bfloat16 where that is native; else by onnxruntime."""
    network = OnnxNetwork(path)  # also says what is wrong with a file that is no network
    try:
        program = OnnxProgram(path)
        program(torch.zeros(1, 3, alignment.size_px, alignment.size_px))
    except UnsupportedOperatorError as error:
        log.info("the teacher runs on the processor, by onnxruntime: %s", error)
        run: Callable[[Tensor], Tensor] = lambda x: torch.from_numpy(network.run(x.cpu().numpy())[0])  # noqa: E731
    else:
        run = _in_native_precision(program)

    @torch.no_grad()
    def embed(images_BCHW: Tensor) -> Tensor:
        pixels = torch.from_numpy(recut(_pixels(images_BCHW), alignment)).to(images_BCHW.device)
        if normalisation.colour == "BGR":
            pixels = pixels.flip(3)
        vectors = run((pixels.permute(0, 3, 1, 2).float() - normalisation.mean) / normalisation.std)
        return F.normalize(vectors.to(images_BCHW.device).float().flatten(1))

    return embed


def _in_native_precision(program: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=distributed.bf16_is_native()):
            result: Tensor = program.to(x.device)(x)
            return result

    return run


def _pixels(images_BCHW: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    values = (images_BCHW.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    return values.permute(0, 2, 3, 1).cpu().numpy()


class Distillation(nn.Module):
    """How far the student is from the teacher, the student's embedding projected linearly where dimensions differ.

    By ``config.match``: mean(1 - cos(student, teacher)), or mean((student - scale * teacher)^2) over images and
    coordinates. The latter is for networks that learned distances, as dlib's did: all their faces lie in a narrow
    cone, where cosines hardly differ and most of an embedding is what every face shares. What the teacher said of
    batches that will recur is kept: 4 bytes a coordinate.
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
