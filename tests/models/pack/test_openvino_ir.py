"""The ONNX conversion of a network in OpenVINO IR computes what OpenVINO computes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.pack.openvino_ir import OpenVinoFormatError, to_onnx
from models.runtime.onnx_runtime import OnnxNetwork

Float = NDArray[np.float32]
SIDE = 8
CONV = (
    'strides="{stride}, {stride}" pads_begin="{pad}, {pad}" pads_end="{pad}, {pad}" '
    'dilations="1, 1" auto_pad="explicit"'
)


@dataclass
class Ir:
    """Writer of an IR whose weights are f16, as those of the Open Model Zoo."""

    layers: list[str] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)
    weights: bytes = b""

    def add(self, kind: str, data: str, inputs: list[tuple[int, list[int]]], shape: list[int]) -> tuple[int, list[int]]:
        number, ports = len(self.layers), ""
        for port, (before, dims) in enumerate(inputs):
            (out,) = re.findall(r'<output><port id="(\d)"', self.layers[before])
            self.edges.append(f'<edge from-layer="{before}" from-port="{out}" to-layer="{number}" to-port="{port}" />')
            ports += f'<port id="{port}" precision="FP32">{_dims(dims)}</port>'
        output = f'<output><port id="{len(inputs)}" precision="FP32">{_dims(shape)}</port></output>'
        self.layers.append(
            f'<layer id="{number}" name="{kind}{number}" type="{kind}" version="opset1"><data {data} />'
            f"{f'<input>{ports}</input>' if ports else ''}{'' if kind == 'Result' else output}</layer>"
        )
        return number, shape

    def constant(self, value: Float) -> tuple[int, list[int]]:
        stored, shape = value.astype("<f2").tobytes(), list(value.shape)
        data = (
            f'element_type="f16" shape="{", ".join(map(str, shape))}" offset="{len(self.weights)}" size="{len(stored)}"'
        )
        self.weights += stored
        number, _ = self.add("Const", data, [], shape)
        self.layers[-1] = self.layers[-1].replace("FP32", "FP16")
        found = self.add("Convert", 'destination_type="f32"', [(number, shape)], shape)
        self.layers[-1] = self.layers[-1].replace("FP32", "FP16", 1)
        return found

    def xml(self) -> bytes:
        layers, edges = "\n".join(self.layers), "\n".join(self.edges)
        text = f'<net name="n" version="11">\n<layers>\n{layers}\n</layers>\n<edges>\n{edges}\n</edges>\n</net>'
        return f'<?xml version="1.0"?>\n{text}\n'.encode()


def _dims(shape: list[int]) -> str:
    return "".join(f"<dim>{side}</dim>" for side in shape)


def small_network(seed: int = 1) -> Ir:
    """Return a bottleneck with squeeze-excitation and shortcut, and a head, as in face-reidentification-retail-0095."""
    rng, ir = np.random.default_rng(seed), Ir()

    def draw(*shape: int) -> tuple[int, list[int]]:
        return ir.constant(rng.normal(0, 0.5, shape).astype(np.float32))

    full, pooled = [1, 4, SIDE // 2, SIDE // 2], [1, 4, 1, 1]
    image = ir.add("Parameter", f'shape="1,3,{SIDE},{SIDE}" element_type="f32"', [], [1, 3, SIDE, SIDE])
    scaled = ir.add("Multiply", 'auto_broadcast="numpy"', [image, draw(1, 3, 1, 1)], [1, 3, SIDE, SIDE])
    stem = ir.add("Convolution", CONV.format(stride=2, pad=1), [scaled, draw(4, 3, 3, 3)], full)
    stem = ir.add("PReLU", "", [stem, draw(1)], full)
    body = ir.add("GroupConvolution", CONV.format(stride=1, pad=1), [stem, draw(4, 1, 1, 3, 3)], full)
    body = ir.add("PReLU", "", [body, draw(4)], full)
    sides = f'kernel="{SIDE // 2}, {SIDE // 2}" strides="{SIDE // 2}, {SIDE // 2}"'
    pads = 'pads_begin="0, 0" pads_end="0, 0" exclude-pad="true" rounding_type="floor" auto_pad="explicit"'
    squeezed = ir.add("AvgPool", f"{sides} {pads}", [body], pooled)
    excited = ir.add("Sigmoid", "", [squeezed], pooled)
    body = ir.add("Multiply", 'auto_broadcast="numpy"', [body, excited], full)
    total = ir.add("Add", 'auto_broadcast="numpy"', [body, stem], full)
    head = ir.add(
        "GroupConvolution", CONV.format(stride=1, pad=0), [total, draw(4, 1, 1, SIDE // 2, SIDE // 2)], pooled
    )
    head = ir.add("Convolution", CONV.format(stride=1, pad=0), [head, draw(6, 4, 1, 1)], [1, 6, 1, 1])
    ir.add("Result", "", [head], [])
    return ir


def converted(xml: bytes, weights: bytes, folder: Path) -> OnnxNetwork:
    onnx.save(to_onnx(xml, weights), str(folder / "network.onnx"))
    return OnnxNetwork(folder / "network.onnx")


def computed_by_openvino(xml: bytes, weights: bytes, images: Float, folder: Path) -> Float:
    (folder / "network.xml").write_bytes(xml)
    (folder / "network.bin").write_bytes(weights)
    core = openvino.Core()
    model = core.read_model(folder / "network.xml")
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.stack([compiled(image[None])[0].reshape(-1) for image in images])


def test_a_converted_network_computes_the_same(tmp_path: Path, rng: np.random.Generator) -> None:
    ir, images = small_network(), rng.normal(size=(3, 3, SIDE, SIDE)).astype(np.float32)
    found = converted(ir.xml(), ir.weights, tmp_path).run(images)[0]
    expected = computed_by_openvino(ir.xml(), ir.weights, images, tmp_path)
    assert found.shape == (3, 6)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_the_network_of_the_open_model_zoo_computes_the_same(
    reference: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    xml, weights = (reference / "retail0095.xml").read_bytes(), (reference / "retail0095.bin").read_bytes()
    images = rng.integers(0, 256, (4, 3, 128, 128)).astype(np.float32)
    network = converted(xml, weights, tmp_path)
    assert network.input_shape[1:] == (3, 128, 128)
    found, expected = network.run(images)[0], computed_by_openvino(xml, weights, images, tmp_path)
    assert found.shape == (4, 256)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: b"", "cannot be read"),
        (lambda x: x[: len(x) // 2], "cannot be read"),
        (lambda x: x.replace(b"<net", b"<!DOCTYPE net><net", 1), "document type"),
        (lambda x: x.replace(b"<net", b"<!-- a --><net", 1), "comment"),
        (lambda x: x.decode().encode("utf-16"), "document type"),
        (lambda x: x.replace(b'from-layer="0"', b'from-layer="%d"' % (x.count(b"<layer ") - 1), 1), "cycle|output"),
        (lambda x: x.replace(b'version="11"', b'version="7"', 1), "no network of OpenVINO IR"),
        (lambda x: x.replace(b'type="Sigmoid"', b'type="Tanh"'), r"layer \d+ \(Tanh\): Kith does not convert"),
        (lambda x: x.replace(b'to-port="1"', b'to-port="0"', 1), "has 1 inputs, not 2"),
        (lambda x: x.replace(b'to-port="1"', b'to-port="x"', 1), "cannot be read"),
        (lambda x: x.replace(b'from-layer="0"', b'from-layer="99"', 1), "fit no layers"),
        (lambda x: x.replace(b'from-layer="0"', b'from-layer="3"', 1), "cycle"),
        (lambda x: x.replace(b'type="Result"', b'type="Sigmoid"'), "no input or no output"),
        (lambda x: x.replace(b'element_type="f16"', b'element_type="i64"', 1), "other than f16 and f32"),
        (lambda x: x.replace(b'offset="0"', b'offset="999999"', 1), "does not fit the file of weights"),
        (lambda x: x.replace(b'offset="0"', b'offset="-2"', 1), "no valid offset"),
        (lambda x: x.replace(b'destination_type="f32"', b'destination_type="f64"', 1), "does not convert weights to"),
        (lambda x: x.replace(b'dilations="1, 1"', b'dilations="2, 2"', 1), "dilations"),
        (lambda x: x.replace(b'auto_pad="explicit"', b'auto_pad="same_upper"', 1), "automatic padding"),
        (lambda x: x.replace(b'kernel="4, 4"', b'kernel="2, 2"', 1), "no average of a whole map"),
        (lambda x: x.replace(b'shape="1, 3, 1, 1"', b'shape="1, 1, 3, 1"', 1), "do not fit each other"),
        (lambda x: x.replace(b'shape="1,3,8,8"', b'shape="1,3,8"', 1), "no single image"),
    ],
)
def test_other_and_damaged_files_are_rejected(change: Callable[[bytes], bytes], message: str) -> None:
    ir = small_network()
    changed = change(ir.xml())
    assert changed != ir.xml()
    with pytest.raises(OpenVinoFormatError, match=message):
        to_onnx(changed, ir.weights)


def test_weights_that_are_cut_off_or_not_finite_are_rejected() -> None:
    ir = small_network()
    with pytest.raises(OpenVinoFormatError, match="is the download incomplete"):
        to_onnx(ir.xml(), ir.weights[:-1])
    with pytest.raises(OpenVinoFormatError, match="not finite"):
        to_onnx(ir.xml(), np.array([np.nan], "<f2").tobytes() + ir.weights[2:])


@settings(max_examples=200)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_damaged_files_raise_only_the_format_error(place: float, value: int) -> None:
    ir = small_network()
    content = bytearray(ir.xml())
    content[int(place * len(content))] = value
    with contextlib.suppress(OpenVinoFormatError):  # other names and unused sides convert without error
        to_onnx(bytes(content), ir.weights)
