"""Hostile ONNX files are rejected with a reason before a runtime opens them; valid files pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from models.checksums import sha256_of
from models.errors import PackError
from models.pack.loading import load_pack
from models.pack.manifest import INT8_FILE, MANIFEST_FILE
from models.runtime import onnx_check, openvino_network
from models.runtime.onnx_check import check_model, check_network, read_model
from models.runtime.onnx_runtime import OnnxNetwork
from models.runtime.openvino_network import OpenVinoNetwork
from tests.packs import pack_with_int8

Edit = Callable[[onnx.ModelProto], object]


def network(*nodes: onnx.NodeProto, weights: list[onnx.TensorProto] | None = None) -> onnx.ModelProto:
    """Return an identity network with additional nodes."""
    graph = helper.make_graph(
        [*nodes, helper.make_node("Identity", ["x"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 112, 112])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3, 112, 112])],
        initializer=[numpy_helper.from_array(np.ones((2, 3), np.float32), "w")] if weights is None else weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def edited(edit: Edit) -> onnx.ModelProto:
    model = network()
    edit(model)
    return model


def with_weight(**fields: Any) -> onnx.ModelProto:
    """Return a network with one weight of these fields, valid or not."""
    whole: dict[str, Any] = {"name": "w", "data_type": TensorProto.FLOAT, "dims": [2, 3]} | fields
    return network(weights=[TensorProto(**whole)])


def outside(location: str) -> onnx.ModelProto:
    entries = [onnx.StringStringEntryProto(key="location", value=location)]
    return with_weight(data_location=TensorProto.EXTERNAL, external_data=entries)


def branches(depth: int, innermost: onnx.NodeProto) -> onnx.NodeProto:
    node = innermost
    for _ in range(depth):
        branch = helper.make_graph([node], "branch", [], [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)])
        node = helper.make_node("If", ["condition"], ["b"], then_branch=branch, else_branch=branch)
    return node


def _function(model: onnx.ModelProto) -> None:
    node = helper.make_node("Relu", ["a"], ["b"])
    model.functions.append(helper.make_function("", "Mine", ["a"], ["b"], [node], [helper.make_opsetid("", 18)]))


def running(operator: str, **attributes: Any) -> onnx.ModelProto:
    return network(helper.make_node(operator, ["x"], ["z"], **attributes))


def taking(given: onnx.ValueInfoProto) -> onnx.ModelProto:
    return edited(lambda model: model.graph.input[0].CopyFrom(given))


BODY = helper.make_graph([helper.make_node("Identity", ["c"], ["d"])], "body", [], [])
HUGE = 2**62
UNDECLARED = [onnx.StringStringEntryProto(key="location", value="a")]
port = helper.make_tensor_value_info
HOSTILE: dict[str, tuple[onnx.ModelProto, str]] = {
    "custom operator": (running("Steal", domain="evil"), "'Steal' of 'evil'"),
    "unknown operator": (running("Steal"), "'Steal' that is not in the ONNX standard"),
    "standard's name for an own function": (edited(_function), "custom operator"),
    "loop": (running("Loop", body=BODY), "Loop"),
    "reads files": (running("ImageDecoder"), "ImageDecoder"),
    "hidden in a branch": (network(branches(2, helper.make_node("Steal", ["x"], ["b"], domain="evil"))), "'evil'"),
    "outside, absolute": (outside("/etc/passwd"), "another file"),
    "outside, undeclared": (with_weight(external_data=UNDECLARED), "another"),
    "outside, in a constant": (running("Constant", value=outside("a").graph.initializer[0]), "another"),
    "too few bytes": (with_weight(raw_data=b"\0" * 20), "20 bytes or numbers, its shape needs 24"),
    "negative side": (with_weight(dims=[-2, -3], raw_data=b"\0" * 24), "exceeds the limits"),
    "sides that overflow": (with_weight(dims=[HUGE, 4], raw_data=b""), "exceeds the limits"),
    "too many sides": (with_weight(dims=[1] * 9, raw_data=b"\0" * 4), "exceeds the limits"),
    "texts": (with_weight(data_type=TensorProto.STRING, string_data=[b"a"] * 6), "non-numeric"),
    "sparse": (edited(lambda m: m.graph.sparse_initializer.add()), "sparse"),
    "no input": (edited(lambda m: m.graph.ClearField("input")), "0 inputs"),
    "two inputs": (edited(lambda m: m.graph.input.append(port("b", 1, [1]))), "2 inputs"),
    "input of texts": (taking(port("x", TensorProto.STRING, [1])), "not a numeric tensor"),
    "input of a sequence": (taking(helper.make_tensor_sequence_value_info("x", 1, [1])), "not a numeric tensor"),
    "oversized input": (taking(port("x", 1, [1, 3, 2**19, 2**19])), "has a shape"),
    "input of nine sides": (taking(port("x", 1, [1] * 9)), "has a shape"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_rejected_with_a_reason(what: str) -> None:
    model, says = HOSTILE[what]
    with pytest.raises(PackError) as refused:
        check_model(model, "x.onnx")
    assert says in str(refused.value)
    assert str(refused.value).startswith("x.onnx: ")


def test_a_valid_network_passes() -> None:
    for dtype in (np.float32, np.float16, np.float64, np.int8, np.uint8, np.int32, np.int64, np.bool_):
        weight = numpy_helper.from_array(np.ones((2, 3), dtype), "w")
        check_model(network(branches(2, helper.make_node("Identity", ["x"], ["b"])), weights=[weight]), "x.onnx")
    for kind in (TensorProto.INT4, TensorProto.UINT4, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN):
        check_model(network(weights=[helper.make_tensor("w", kind, [3], [1, 0, 1])]), "x.onnx")
    check_model(network(weights=[numpy_helper.from_array(np.ones((0, 3), np.float32), "w")]), "x.onnx")


def test_nodes_of_subgraphs_count_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_check, "MAX_NODES", 100)
    nodes = [helper.make_node("Identity", ["x"], [f"n{i}"]) for i in range(60)]
    check_model(network(*nodes), "x.onnx")
    branch = helper.make_graph(nodes, "branch", [], [])
    inside = helper.make_node("If", ["condition"], ["z"], then_branch=branch, else_branch=branch)
    with pytest.raises(PackError, match="more than 100 nodes"):
        check_model(network(inside), "x.onnx")


@pytest.mark.parametrize("opens", [OnnxNetwork, OpenVinoNetwork])
def test_rejected_files_reach_no_runtime(opens: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.onnx"
    onnx.save(HOSTILE["custom operator"][0], path)
    seen: list[str] = []
    monkeypatch.setattr(OnnxNetwork, "open_session", lambda *_: seen.append("onnxruntime"))

    monkeypatch.setattr(openvino_network._import_openvino().Core, "read_model", lambda *_: seen.append("openvino"))
    with pytest.raises(PackError, match="evil"):
        opens(path)
    assert seen == []


def test_oversized_files_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    with path.open("wb") as file:
        file.truncate(onnx_check.MAX_BYTES + 1)  # sparse file
    with pytest.raises(PackError, match="more than"):
        check_network(path)
    with pytest.raises(PackError, match="is not a file"):
        check_network(tmp_path)


@settings(max_examples=150)
@given(draw=st.data())
def test_damaged_files_raise_only_the_pack_error(draw: st.DataObject, tmp_path: Path) -> None:
    whole = bytearray(network(branches(1, helper.make_node("Identity", ["x"], ["b"]))).SerializeToString())
    for _ in range(draw.draw(st.integers(1, 6))):
        whole[draw.draw(st.integers(0, len(whole) - 1))] = draw.draw(st.integers(0, 255))
    path = tmp_path / "x.onnx"
    path.write_bytes(whole[: draw.draw(st.integers(0, len(whole)))])
    with suppress(PackError):
        check_model(read_model(path), path.name)


# Packs


def test_every_file_of_a_pack_is_checked(tmp_path: Path) -> None:
    untrusted = pack_with_int8(tmp_path / "pack")
    load_pack(untrusted).verify()
    small = untrusted / "int8" / "recognizer.onnx"
    onnx.save(HOSTILE["custom operator"][0], small)
    listed = json.loads((untrusted / INT8_FILE).read_text())
    listed["recognition"]["sha256"] = sha256_of(small)
    (untrusted / INT8_FILE).write_text(json.dumps(listed))
    with pytest.raises(PackError, match=r"recognizer\.onnx: has an operator 'Steal'"):
        load_pack(untrusted).verify()


def test_malformed_manifests_are_rejected(tmp_path: Path) -> None:
    number, version = '{"manifest_version": ' + "9" * 5000 + "}", '{"manifest_version": 2}'
    for text in ("[" * 100_000, number, " " * 16_000_001, "\ufeff{}", version, "{"):
        (tmp_path / MANIFEST_FILE).write_text(text)
        with pytest.raises(PackError):
            load_pack(tmp_path)
