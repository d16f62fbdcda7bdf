"""Writer of dlib's file format, which computes the same network in torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from models.pack.dlib_resnet import DIMENSION, SIDE_PX

MEAN = (122.782, 117.001, 104.298)
Floats = NDArray[np.float32]


def integer(value: int) -> bytes:
    digits = abs(value).to_bytes((abs(value).bit_length() + 7) // 8 or 1, "little")
    return bytes([len(digits) | (0x80 if value < 0 else 0)]) + digits


def integers(*values: int) -> bytes:
    return b"".join(map(integer, values))


def number(value: float) -> bytes:
    mantissa, exponent = np.frexp(value)
    return integers(int(mantissa * 2**24), int(exponent) - 24)


def text(value: str) -> bytes:
    return integer(len(value)) + value.encode()


def tensor(values: Floats) -> bytes:
    return integers(2, len(values), 1, 1, 1) + values.astype("<f4").tobytes()


class Writer:
    """Writer of dlib's format that computes the same network in torch."""

    def __init__(self, rng: np.random.Generator, photos_BCHW: torch.Tensor) -> None:
        self._rng = rng
        numbers = b"".join(map(number, MEAN))
        self._pieces = [b"\1\2head", text("input_rgb_image_sized"), numbers, integers(SIDE_PX, SIDE_PX)]
        self.value = (photos_BCHW - torch.tensor(MEAN).reshape(1, 3, 1, 1)) / 256
        self._layers = 0

    def content(self) -> bytes:
        return b"".join(self._pieces)

    def _layer(self, *pieces: bytes) -> None:
        if self._layers:
            self._pieces.append(b"101" + (integer(1) if self._layers == 1 else b""))
            self._pieces += [integers(2, 0, 0, 0, 0)] * 3
        self._pieces += pieces
        self._layers += 1

    def convolution(self, filters: int, size: int, stride: int, pad: int) -> None:
        channels = self.value.shape[1]
        weights = self._rng.normal(0, 0.3, filters * channels * size**2 + filters).astype(np.float32)
        sizes = integers(filters, size, size, stride, stride, pad, pad)
        self._layer(text("con_4"), tensor(weights), sizes, integers(*range(10)), *[number(1.0)] * 4)
        kernel = torch.from_numpy(weights[:-filters].reshape(filters, channels, size, size))
        self.value = F.conv2d(self.value, kernel, torch.from_numpy(weights[-filters:]), stride, pad)

    def affine(self) -> None:
        weights = self._rng.normal(1, 0.3, 2 * self.value.shape[1]).astype(np.float32)
        self._layer(text("affine_"), tensor(weights), integers(*range(11)))
        factors, offsets = torch.from_numpy(weights).reshape(2, 1, -1, 1, 1)
        self.value = self.value * factors + offsets

    def relu(self) -> None:
        self._layer(text("relu_"))
        self.value = F.relu(self.value)

    def pool(self, kind: str, size: int, stride: int) -> None:
        self._layer(text(kind), integers(size, size, stride, stride, 0, 0))
        if size:
            pooled = F.max_pool2d if kind == "max_pool_2" else F.avg_pool2d
            self.value = pooled(self.value, size, stride)

    def block(self, filters: int, halving: bool) -> None:
        shortcut = self.value
        self.convolution(filters, 3, 2 if halving else 1, 0 if halving else 1)
        self.affine()
        self.relu()
        self.convolution(filters, 3, 1, 1)
        self.affine()
        if halving:
            before, self.value = self.value, shortcut
            self.pool("avg_pool_2", 2, 2)
            shortcut, self.value = self.value, before
        self._layer(text("add_prev_"))
        whole = torch.zeros(
            len(shortcut), *(max(a, b) for a, b in zip(shortcut.shape[1:], self.value.shape[1:], strict=True))
        )
        for part in (shortcut, self.value):
            whole[:, : part.shape[1], : part.shape[2], : part.shape[3]] += part
        self.value = whole
        self.relu()

    def end(self) -> None:
        self.pool("avg_pool_2", 0, 1)
        channels = self.value.shape[1]
        weights = self._rng.normal(0, 0.3, channels * DIMENSION).astype(np.float32)
        self._layer(text("fc_2"), integers(DIMENSION, 0), tensor(weights))
        self.value = self.value.mean((2, 3)) @ torch.from_numpy(weights.reshape(channels, DIMENSION))


def small_network(
    rng: np.random.Generator, photos: Floats, blocks: Sequence[tuple[int, bool]], stem: int = 3
) -> Writer:
    """Return the writer of a network with these blocks, each of a number of filters, halving or not."""
    writer = Writer(rng, torch.from_numpy(photos))
    writer.convolution(stem, 7, 2, 0)
    writer.affine()
    writer.relu()
    writer.pool("max_pool_2", 3, 2)
    for filters, halving in blocks:
        writer.block(filters, halving)
    writer.end()
    return writer
