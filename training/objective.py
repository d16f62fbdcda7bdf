"""What a step minimises: a head's loss, terms beside it, a teacher's embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from training.config import ConfigError, DistillConfig, RunConfig
from training.distillation import Distillation, load_teacher
from training.losses import CosineHead, Head, PartialFC, build_head, build_term


class Objective(nn.Module):
    """The weighted sum of a head, terms and a distillation, each part by its name."""

    def __init__(
        self, head: Head, terms: Mapping[str, tuple[float, nn.Module]], distillation: tuple[float, Distillation] | None
    ) -> None:
        super().__init__()
        self.head = head
        self.terms = nn.ModuleDict({name: term for name, (_, term) in terms.items()})
        self.term_weights = {name: weight for name, (weight, _) in terms.items()}
        self.distillation = distillation[1] if distillation else None
        self.distillation_weight = distillation[0] if distillation else 0.0

    def forward(
        self,
        embeddings_BD: Tensor,
        labels_B: Tensor,
        images_BCHW: Tensor,
        labelled_B: Tensor | None = None,
        batch: int | None = None,
    ) -> dict[str, Tensor]:
        """Parts by name.

        Args:
            labelled_B: the images that show whom their label names: head and terms see these alone; None: all.
            batch: a number that these very images, and no others, come under.
        """
        own_BD, own_labels_B = embeddings_BD, labels_B
        if labelled_B is not None:
            own_BD, own_labels_B = embeddings_BD[labelled_B], labels_B[labelled_B]
        parts = {"head": self.head(own_BD, own_labels_B)}
        weights_CD = self.head.class_weights()
        for name, term in self.terms.items():
            parts[name] = self.term_weights[name] * term(own_BD, own_labels_B, weights_CD)
        if self.distillation is not None:
            parts["distillation"] = self.distillation_weight * self.distillation(embeddings_BD, images_BCHW, batch)
        return parts


def build_objective(config: RunConfig, num_classes: int) -> Objective:
    """By the run's settings.

    Raises:
        ConfigError: a head, term or teacher cannot be used, or does not go together with another setting.
    """
    dim = config.backbone.embedding_dim
    head = build_head(config.head, dim, num_classes)
    if config.loop.class_sampling:
        head = _split(head, config.loop.class_sampling)
    terms = {t.name: (t.weight, build_term(t, head, dim, num_classes)) for t in config.terms}
    if config.head.name == "none" and not terms and config.distill.teacher is None:
        raise ConfigError("head none learns nothing alone: add a term (terms.triplet=1) or a teacher")
    distillation, chosen = None, config.distill
    if chosen.teacher is not None:
        distillation = (chosen.weight, Distillation(load_teacher(chosen.teacher), dim, chosen))
    return Objective(head, terms, distillation)


def check_objective(config: RunConfig) -> None:
    """Build it for a handful of classes: what makes no sense is said before hours of decoding.

    Raises:
        ConfigError: as of :func:`build_objective`.
    """
    build_objective(
        replace(config, distill=DistillConfig()) if config.terms or config.head.name != "none" else config, 64
    )


def _split(head: Head, sampling: float) -> Head:
    if not isinstance(head, CosineHead):
        raise ConfigError(f"loop.class_sampling is for cosine heads; {type(head).__name__} is none")
    try:
        return PartialFC(head, sampling)
    except ValueError as error:
        raise ConfigError(f"loop.class_sampling: {error}") from error
