"""Objective of a training step: the head's loss, terms, and distillation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from training.config import ConfigError, RunConfig
from training.losses import build_head, build_term
from training.losses.core import Agents, CosineHead, Head, NoHead
from training.losses.partial_fc import PartialFC
from training.optimization.distillation import Distillation

Terms = Mapping[str, tuple[float, nn.Module]]
"""Weights and losses by name."""


class Objective(nn.Module):
    """Weighted losses of a head, terms and a distillation, by name."""

    def __init__(self, head: Head, terms: Terms, distillation: Distillation | None) -> None:
        super().__init__()
        self.head, self.distillation = head, distillation
        self.terms = nn.ModuleDict({name: term for name, (_, term) in terms.items()})
        self.term_weights = {name: weight for name, (weight, _) in terms.items()}

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor, rows_B: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the parts by name. ``rows_B``: of the images in the set."""
        parts = {"head": self.head(embeddings_BD, labels_B)}
        weights_CD = self.head.class_weights()
        for name, term in self.terms.items():
            parts[name] = self.term_weights[name] * term(embeddings_BD, labels_B, weights_CD)
        if self.distillation is not None:
            parts["distillation"] = self.distillation(embeddings_BD, rows_B)
        return parts


def build_objective(config: RunConfig, num_classes: int, taught_ND: Tensor | None = None) -> Objective:
    """Build the objective of a run. Raises ConfigError on invalid settings.

    ``taught_ND``: a teacher's embeddings of all images.
    """
    head, terms = build_losses(config, num_classes)
    dim, weight = config.backbone.embedding_dim, config.distill.weight
    return Objective(head, terms, None if taught_ND is None else Distillation(taught_ND, dim, weight))


def build_losses(config: RunConfig, num_classes: int) -> tuple[Head, Terms]:
    """Build head and terms. Raises ConfigError on invalid settings."""
    dim = config.backbone.embedding_dim
    head = build_head(config.head, dim, num_classes)
    if config.loop.interclass_filter:
        if not isinstance(head, CosineHead):
            raise ConfigError(f"loop.interclass_filter needs a cosine head, which {config.head.name} is not")
        head.interclass_filter = config.loop.interclass_filter
    if config.loop.class_sampling:
        if not isinstance(head, CosineHead):
            raise ConfigError(f"loop.class_sampling needs a cosine head, which {type(head).__name__} is not")
        try:
            head = PartialFC(head, config.loop.class_sampling)
        except ValueError as error:
            raise ConfigError(f"loop.class_sampling: {error}") from error
    terms = {t.name: (t.weight, build_term(t, head, dim, num_classes)) for t in config.terms}
    if isinstance(head, NoHead) and not terms and config.distill.teacher is None:
        term = "class_triplet" if isinstance(head, Agents) else "triplet"
        raise ConfigError(f"Head {config.head.name} needs a term (terms.{term}=1) or a teacher")
    return head, terms
