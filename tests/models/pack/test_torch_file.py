"""Weights of PyTorch's older format are read without running anything."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.pack.torch_file import TorchFileError, read_tensors


def saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def test_tensors_are_those_of_torch() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4))
    state = network.state_dict()
    state["shared"] = state["0.weight"].view(-1)[5:9]  # a second tensor in one storage
    found = read_tensors(saved(state))
    assert list(found) == list(state)
    for name, value in state.items():
        np.testing.assert_array_equal(found[name], value.numpy())


class Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("place", ["value", "whole", "first"])
def test_pickles_are_not_executed(place: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    attack = Attack(mark)
    if place == "first":
        content = pickle.dumps(attack, protocol=2)
    else:
        content = saved(OrderedDict(a=attack) if place == "value" else attack)
    with pytest.raises(TorchFileError, match="not executed"):
        read_tensors(content)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends early|damaged"),
        (b"PK\x03\x04", "damaged"),
        (pickle.dumps(5, protocol=2), "format before version 1.6"),
        (saved(OrderedDict(a=torch.zeros(2, 3).t())), "not contiguous"),
        (saved(OrderedDict(a=torch.zeros(2, dtype=torch.float64))), "DoubleStorage"),
        (saved(OrderedDict(a=torch.zeros(2)))[:-4], "damaged"),
    ],
)
def test_other_files_are_rejected(content: bytes, message: str) -> None:
    with pytest.raises(TorchFileError, match=message):
        read_tensors(content)


@settings(max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_damaged_files_raise_only_the_format_error(place: float, value: int) -> None:
    content = bytearray(saved(nn.Linear(3, 2).state_dict()))
    content[int(place * len(content))] = value
    with contextlib.suppress(TorchFileError):  # changed weights are read without error
        read_tensors(bytes(content))
