"""Distillation from a teacher's embeddings, which are computed once, before a run."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from training.distributed import to_device
from training.losses.core import upcast


class Distillation(nn.Module):
    """Mean of 1 - cos(student, teacher), with a linear projection if dimensions differ.

    Args:
        taught_ND: (n, D) unit embeddings of a teacher of all images. They stay in the memory of the host.
        student_dim: length of the student's embeddings.
        weight: factor of the loss.
    """

    def __init__(self, taught_ND: Tensor, student_dim: int, weight: float = 1.0) -> None:
        super().__init__()
        self.taught_ND, self.weight = taught_ND, weight
        teacher_dim = taught_ND.shape[1]
        same = teacher_dim == student_dim
        self.projection = nn.Identity() if same else nn.Linear(student_dim, teacher_dim, bias=False)

    def forward(self, embeddings_BD: Tensor, rows_B: NDArray[np.int64]) -> Tensor:
        """Return the loss of the embeddings of the images in these rows, however they were augmented."""
        wanted_BD = to_device(self.taught_ND[torch.from_numpy(rows_B)], embeddings_BD.device)
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            return self.weight * (1 - F.cosine_similarity(self.projection(upcast(embeddings_BD)), wanted_BD)).mean()
