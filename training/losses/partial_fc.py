"""A cosine head whose classes are split over ranks, each step using a sample of them.

X. An et al., "Killing two birds with one stone: efficient and robust training of face recognition CNNs by Partial FC",
CVPR 2022, section 3. Every rank sees the whole batch and its own classes; the softmax's sum is taken over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from training import distributed
from training.losses.core import CosineHead, Head, wide


class PartialFC(Head):
    """Wraps a head in which classes meet only in the softmax's sum.

    Args:
        head: the full head, equal on all ranks; this rank keeps its share of the classes.
        sampling: share of its classes that a rank uses in a step, in (0, 1]. The classes of the batch are always
            among them; the others are drawn anew from torch's global generator.
    """

    def __init__(self, head: CosineHead, sampling: float) -> None:
        super().__init__()
        if not head.shardable:
            raise ValueError(f"{type(head).__name__} needs all classes at once and cannot be split")
        if not 0 < sampling <= 1:
            raise ValueError(f"class sampling lies in (0, 1], not {sampling}")
        if head.num_classes < distributed.world_size():
            raise ValueError(f"{head.num_classes} classes cannot be split over {distributed.world_size()} ranks")
        self.sampling = sampling
        self.num_classes = head.num_classes
        self.table_PD: Tensor
        self.part = distributed.share(self.num_classes, distributed.rank(), distributed.world_size())
        self.head = head
        head.sees_all_ranks = True
        # The head's own weight is the sample of a step; the rank's rows, and the optimiser's state of them, lie here.
        self.register_buffer("table_PD", head.weight.detach()[self.part].clone(), persistent=False)
        head.weight = nn.Parameter(self.table_PD.clone())
        self._in_optimiser = head.weight
        self.slots_PD: dict[str, Tensor] = {}
        self._rows = torch.arange(0)

    @property
    def margin_share(self) -> float:
        return self.head.margin_share

    @margin_share.setter
    def margin_share(self, share: float) -> None:
        self.head.margin_share = share

    def readings(self) -> dict[str, float]:
        return self.head.readings()

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            x_AD = distributed.gathered_with_gradient(wide(embeddings_BD))
            labels_A = self._sample(distributed.gathered(labels_B))
            logits_AS = self.head.logits(x_AD, labels_A)
            loss: Tensor = _ShardedCrossEntropy.apply(logits_AS, labels_A)  # type: ignore[no-untyped-call]
            # Of this rank's samples alone: gradients are averaged over ranks afterwards.
            return loss + self.head.regulariser(wide(embeddings_BD).norm(dim=1))

    @torch.no_grad()
    def _sample(self, labels_A: Tensor) -> Tensor:
        """Choose this step's classes; return labels as columns of the sample, -1 where the class is elsewhere."""
        local_A = labels_A - self.part.start
        here_A = (local_A >= 0) & (local_A < len(self.table_PD))
        priority_P = torch.rand(len(self.table_PD), device=labels_A.device)
        priority_P[local_A[here_A]] = 2.0
        count = max(math.ceil(self.sampling * len(priority_P)), int((priority_P == 2.0).sum()))
        self._rows = priority_P.topk(count).indices.sort().values
        # A new parameter: autograd may still hold the last step's graph, which remembers the old shape.
        self.head.weight = nn.Parameter(self.table_PD[self._rows])
        columns_A = torch.searchsorted(self._rows, local_A.clamp(0, len(self.table_PD) - 1))
        return torch.where(here_A, columns_A, -1)

    @contextmanager
    def stepping(self, optimiser: Optimizer) -> Iterator[None]:
        weight = self.head.weight
        for group in optimiser.param_groups:
            group["params"] = [weight if p is self._in_optimiser else p for p in group["params"]]
        state = optimiser.state[weight] = optimiser.state.pop(self._in_optimiser, {})
        self._in_optimiser = weight
        for name, slot_PD in self.slots_PD.items():
            state[name] = slot_PD[self._rows]
        yield
        # Not reached after an error: the rows stay as they were.
        self.table_PD[self._rows] = weight.data
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                self.slots_PD.setdefault(name, torch.zeros_like(self.table_PD))[self._rows] = value

    def whole_state(self) -> dict[str, Tensor]:
        """The state of the full head, whatever the number of ranks; every rank must call."""
        return {**self.head.state_dict(), "weight": distributed.gathered(self.table_PD)}

    def load_whole_state(self, state: dict[str, Tensor]) -> None:
        if len(state["weight"]) != self.num_classes:
            raise ValueError(f"{len(state['weight'])} classes were saved, there are {self.num_classes}")
        self.table_PD = state["weight"][self.part].clone().to(self.table_PD)
        self.head.load_state_dict({**state, "weight": self.head.weight.detach()})

    def whole_slots(self) -> dict[str, Tensor]:
        """The optimiser's row-wise state of the full weight; every rank must call."""
        return {name: distributed.gathered(slot_PD) for name, slot_PD in sorted(self.slots_PD.items())}

    def load_whole_slots(self, slots: dict[str, Tensor]) -> None:
        self.slots_PD = {name: value[self.part].clone().to(self.table_PD) for name, value in slots.items()}


class _ShardedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of (B, S) logits whose classes are spread over ranks; label -1 where the target is not here.

    The gradient is that of this rank's logits alone.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits_BS: Tensor, labels_B: Tensor) -> Tensor:
        rows = (labels_B >= 0).nonzero().squeeze(1)
        top_B, target_B = logits_BS.amax(1), logits_BS.new_zeros(len(logits_BS))
        target_B[rows] = logits_BS[rows, labels_B[rows]]
        _reduce(top_B, dist.ReduceOp.MAX)
        exponentials_BS = (logits_BS - top_B[:, None]).exp()
        sum_B = exponentials_BS.sum(1)
        _reduce(sum_B, dist.ReduceOp.SUM)
        _reduce(target_B, dist.ReduceOp.SUM)
        ctx.save_for_backward(exponentials_BS / sum_B[:, None], labels_B)
        return (sum_B.log() + top_B - target_B).mean()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        probability_BS, labels_B = ctx.saved_tensors  # type: ignore[attr-defined]
        rows = (labels_B >= 0).nonzero().squeeze(1)
        gradient_BS = probability_BS.clone()
        gradient_BS[rows, labels_B[rows]] -= 1
        return gradient_BS * (gradients[0] / len(labels_B)), None


def _reduce(values: Tensor, how: dist.ReduceOp.RedOpType) -> None:
    if distributed.world_size() > 1:
        dist.all_reduce(values, how)
