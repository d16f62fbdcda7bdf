"""Partial FC: a cosine head with classes split over ranks and sampled in each step.

X. An et al., "Killing two birds with one stone: efficient and robust training of face recognition CNNs by Partial FC",
CVPR 2022, section 3. Every rank sees the global batch and its own classes; the softmax sums over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training import distributed
from training.errors import require
from training.losses.core import CosineHead, Head, half_angles


class PartialFC(Head):
    """Wrapper that shards and samples the classes of a shardable head.

    Args:
        head: the full head, equal on all ranks; this rank keeps its share of the classes.
        sampling: share of its classes that a rank uses in a step, in (0, 1], but at least as many as the batch has
            images. The classes of the batch are included; torch's global generator selects the others. A step with
            all classes copies none.
    """

    def __init__(self, head: CosineHead, sampling: float) -> None:
        super().__init__()
        ranks = distributed.world_size()
        require(head.shardable, f"{type(head).__name__} needs all classes at once and cannot be split")
        require(0 < sampling <= 1, f"class sampling lies in (0, 1], not {sampling}")
        require(head.num_classes >= ranks, f"{head.num_classes} classes cannot be split over {ranks} ranks")
        self.head, self.sampling, self.num_classes = head, sampling, head.num_classes
        self.part = distributed.split_evenly(self.num_classes, distributed.rank(), ranks)
        self.table_PD: Tensor
        head.gets_global_batch = True
        # The head's weight holds the sample of a step, or is the table. The table and its optimizer state hold all rows
        # of this rank.
        self.register_buffer("table_PD", head.weight.detach()[self.part].clone(), persistent=False)
        head.weight = nn.Parameter(self.table_PD.clone())
        self._in_optimizer = head.weight
        self.optimizer_state_PD: dict[str, Tensor] = {}
        self._rows = torch.arange(0)
        self._shared: Tensor | None = None
        """The table, if the head's weight is the same memory."""
        self._labels_A: Tensor | None = None
        """Labels of the step's global batch, once its classes are sampled."""
        self._angle = torch.tensor(0.0)

    @property
    def margin_share(self) -> float:
        return self.head.margin_share

    @margin_share.setter
    def margin_share(self, share: float) -> None:
        self.head.margin_share = share

    def log_values(self) -> dict[str, Tensor]:
        return self.head.log_values()

    def begin_step(self, labels_B: Tensor) -> None:
        self._labels_A = distributed.all_gather(labels_B)
        self._sample(self._labels_A)

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        x_AD, known_A = distributed.all_gather_sum_grad(x_BD), self._labels_A
        if known_A is None or len(known_A) != len(x_AD):  # no step was begun, or this is a part of its batch
            known_A = distributed.all_gather(labels_B)
        if self._labels_A is None:
            self._sample(known_A)
        labels_A = self._columns(known_A)
        logits_AS = self.head.logits(x_AD, labels_A)
        self._angle = self._own_angle(x_AD, labels_A)
        self.accuracy = self.head.accuracy
        loss: Tensor = _ShardedCrossEntropy.apply(logits_AS, labels_A)  # type: ignore[no-untyped-call]
        # Only the samples of this rank: gradients are averaged over ranks afterwards.
        return loss + self.head.regularizer(x_BD.norm(dim=1))

    def target_angle_deg(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return this rank's share of the mean target angle of the last batch; the mean over ranks is that angle."""
        return self._angle

    @torch.no_grad()
    def _own_angle(self, x_AD: Tensor, labels_A: Tensor) -> Tensor:
        angles_A = torch.rad2deg(half_angles(x_AD, self.head.weight[labels_A.clamp(min=0)]))
        return torch.where(labels_A >= 0, angles_A, 0).mean() * distributed.world_size()

    @torch.no_grad()
    def _sample(self, labels_A: Tensor) -> None:
        """Sample this step's classes. Their number does not depend on the labels, so that a GPU need not report it."""
        count = len(self.table_PD)
        sampled = min(count, max(math.ceil(self.sampling * count), len(labels_A)))
        if sampled == count:
            if self._shared is not self.table_PD:  # at first, and after the table was loaded or moved
                self._shared, self.head.weight = self.table_PD, nn.Parameter(self.table_PD)
                self._rows = torch.arange(count, device=labels_A.device)
            return
        self._shared = None
        local_A = labels_A - self.part.start
        here_A = (local_A >= 0) & (local_A < count)
        priority = torch.rand(count + 1, device=labels_A.device)
        # The last element takes the labels of other ranks. Indices by a number would copy it to the device.
        priority.scatter_(0, torch.where(here_A, local_A, count), 2.0)
        self._rows = priority[:count].topk(sampled).indices.sort().values
        # A new parameter, because autograd may still hold the last step's graph with the old shape.
        self.head.weight = nn.Parameter(self.table_PD[self._rows])

    def _columns(self, labels_A: Tensor) -> Tensor:
        """Return labels as columns of the sample, -1 for classes on other ranks."""
        local_A = labels_A - self.part.start
        here_A = (local_A >= 0) & (local_A < len(self.table_PD))
        columns_A = torch.searchsorted(self._rows, local_A.clamp(0, len(self.table_PD) - 1))
        return torch.where(here_A, columns_A, -1)

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        self._labels_A = None
        weight = self.head.weight
        for group in optimizer.param_groups:
            group["params"] = [weight if p is self._in_optimizer else p for p in group["params"]]
        state = optimizer.state[weight] = optimizer.state.pop(self._in_optimizer, {})
        self._in_optimizer = weight
        if self._shared is not None:
            state.update(self.optimizer_state_PD)
            yield
            self.optimizer_state_PD = {name: value for name, value in state.items() if _is_table(value, weight)}
            return
        for name, state_PD in self.optimizer_state_PD.items():
            state[name] = state_PD[self._rows]
        yield
        # Not reached after an error: the rows keep their old values.
        self.table_PD[self._rows] = weight.data
        for name, value in state.items():
            if _is_table(value, weight):
                self.optimizer_state_PD.setdefault(name, torch.zeros_like(self.table_PD))[self._rows] = value

    def full_state(self) -> dict[str, Tensor]:
        """Return the state of the full head. Collective: every rank must call it."""
        return {**self.head.state_dict(), "weight": distributed.all_gather_parts(self.table_PD, self.num_classes)}

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        saved = len(state["weight"])
        require(saved == self.num_classes, f"{saved} classes were saved, and the head has {self.num_classes}")
        self.table_PD = state["weight"][self.part].clone().to(self.table_PD)
        self.head.load_state_dict({**state, "weight": self.head.weight.detach()})

    def own_tables(self) -> dict[str, Tensor]:
        """Return this rank's rows of the weight and of the optimizer's row-wise state, by name."""
        return {"weight": self.table_PD, **self.optimizer_state_PD}

    def load_own_tables(self, names: Sequence[str], fill: Callable[[dict[str, Tensor]], None]) -> None:
        """Let ``fill`` write this rank's rows of the named tables in place."""
        tables = {name: self.table_PD if name == "weight" else torch.zeros_like(self.table_PD) for name in names}
        fill(tables)
        self.optimizer_state_PD = {name: table for name, table in tables.items() if name != "weight"}

    def full_optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer's row-wise state of the full weight. Collective: every rank must call it."""
        return {
            name: distributed.all_gather_parts(state_PD, self.num_classes)
            for name, state_PD in sorted(self.optimizer_state_PD.items())
        }

    def load_full_optimizer_state(self, slots: dict[str, Tensor]) -> None:
        self.optimizer_state_PD = {name: value[self.part].clone().to(self.table_PD) for name, value in slots.items()}


class _ShardedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of (B, S) logits with classes spread over ranks; label -1 for a target on another rank. The
    gradient covers the logits of this rank only."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits_BS: Tensor, labels_B: Tensor) -> Tensor:
        top_B, index_B1 = distributed.all_reduce_max(logits_BS.amax(1)), labels_B.clamp(min=0)[:, None]
        target_B = torch.where(labels_B >= 0, logits_BS.gather(1, index_B1).squeeze(1), 0)
        target_B = distributed.all_reduce_sum(target_B)
        exponentials_BS = (logits_BS - top_B[:, None]).exp()
        sum_B = distributed.all_reduce_sum(exponentials_BS.sum(1))
        ctx.save_for_backward(exponentials_BS / sum_B[:, None], labels_B)
        return (sum_B.log() + top_B - target_B).mean()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        probability_BS, labels_B = ctx.saved_tensors  # type: ignore[attr-defined]
        index_B1, target_B1 = labels_B.clamp(min=0)[:, None], (labels_B >= 0)[:, None]
        gradient_BS = probability_BS.scatter_add(1, index_B1, -target_B1.to(probability_BS.dtype))
        return gradient_BS * (gradients[0] / len(labels_B)), None


def _is_table(value: object, weight: Tensor) -> TypeGuard[Tensor]:
    """Return whether a value of an optimizer's state has a row per class, unlike its count of steps."""
    return isinstance(value, Tensor) and value.shape == weight.shape
