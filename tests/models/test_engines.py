"""The choice of engine and numbers: the fastest whose loss is known and small, what is pinned, and why, in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.engines import Abilities, Choice, Wish, abilities, choose, open_network
from models.errors import PackError, RuntimeUnavailableError
from models.network import Engine, Float, Precision
from models.openvino_network import OpenVinoNetwork
from models.pack import BUNDLED, MANIFEST, RecognitionSpec, Variant, load_pack, sha256_of

BOTH: Abilities = {"openvino": {"fp32", "bf16", "int8"}, "onnxruntime": {"fp32", "int8"}}
OLD: Abilities = {"openvino": {"fp32"}, "onnxruntime": {"fp32"}}


def spec(lost: Mapping[Precision, float | None] | None = None) -> RecognitionSpec:
    """The bundled recogniser with variants that lose so many points; None: not measured."""
    variants = tuple(
        Variant(precision, BUNDLED / "recogniser.onnx", "0" * 64, "0" * 64, {} if p is None else {"points_lost": p})
        for precision, p in (lost or {}).items()
    )
    return replace(load_pack(BUNDLED).recognition, variants=variants)


@pytest.mark.parametrize(
    ("lost", "wish", "able", "engine", "precision"),
    [
        ({"int8": 0.05}, Wish(), BOTH, "openvino", "int8"),
        ({"int8": -0.02}, Wish(), BOTH, "openvino", "int8"),
        ({"int8": 0.11}, Wish(), BOTH, "openvino", "bf16"),
        ({"int8": None}, Wish(), BOTH, "openvino", "bf16"),
        ({"int8": 0.11, "bf16": 0.2}, Wish(), BOTH, "openvino", "fp32"),
        ({}, Wish(), BOTH, "openvino", "bf16"),
        ({"int8": 0.05}, Wish(), OLD, "openvino", "fp32"),
        ({"int8": 0.05}, Wish(engine="onnxruntime"), BOTH, "onnxruntime", "int8"),
        ({}, Wish(engine="onnxruntime"), BOTH, "onnxruntime", "fp32"),
        ({"int8": 0.05}, Wish(provider="CPUExecutionProvider"), BOTH, "onnxruntime", "int8"),
        ({"int8": 0.05}, Wish(precision="fp32"), BOTH, "openvino", "fp32"),
        ({"int8": 0.5}, Wish(precision="int8"), OLD, "openvino", "int8"),
        ({}, Wish(precision="int8"), BOTH, "openvino", "bf16"),
        ({"int8": 0.05}, Wish(), {"onnxruntime": {"fp32"}}, "onnxruntime", "fp32"),
    ],
)
def test_the_choice(
    lost: dict[Precision, float | None], wish: Wish, able: Abilities, engine: Engine, precision: Precision
) -> None:
    choice = choose(spec(lost), wish, able)
    assert (choice.engine, choice.precision) == (engine, precision)
    assert choice.why


@pytest.mark.parametrize(
    ("wish", "able", "says"),
    [
        (Wish(engine="openvino"), {"onnxruntime": {"fp32"}}, "openvino is not installed"),
        (Wish(precision="bf16"), OLD, "no bf16 on this processor"),
        (Wish(engine="onnxruntime", precision="bf16"), BOTH, "onnxruntime has no bf16"),
        (Wish(engine="openvino", provider="CPUExecutionProvider"), BOTH, "KITH_PROVIDER"),
    ],
)
def test_what_is_pinned_and_missing_is_refused(wish: Wish, able: Abilities, says: str) -> None:
    with pytest.raises(RuntimeUnavailableError, match=says):
        choose(spec(), wish, able)


def test_each_engine_gives_the_same_vectors(rng: np.random.Generator) -> None:
    crops = rng.standard_normal((11, 3, 112, 112)).astype(np.float32)
    pack = load_pack(BUNDLED)
    wanted = open_network(pack.recognition, Wish("onnxruntime", "fp32")).run(crops)[0]
    for engine in abilities():
        network = open_network(pack.recognition, Wish(engine, "fp32"))
        assert (network.engine, network.precision, network.why) == (engine, "fp32", "pinned")
        np.testing.assert_allclose(network.run(crops)[0], wanted, atol=1e-3 * np.abs(wanted).max())


def test_a_file_that_is_no_network(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"not a network")
    with pytest.raises(PackError, match=r"x\.onnx"):
        open_network(replace(spec(), path=tmp_path / "x.onnx"), Wish())


@pytest.fixture
def varied(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A pack with an int8 variant, which is the main file under another name, and its manifest."""
    directory = Path(shutil.copytree(BUNDLED, tmp_path / "varied"))
    (directory / "int8").mkdir(exist_ok=True)
    shutil.copy(directory / "recogniser.onnx", directory / "int8" / "recogniser.onnx")
    own = sha256_of(directory / "recogniser.onnx")
    manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    manifest["variants"] = {
        "recognition": {
            "int8": {"file": "int8/recogniser.onnx", "sha256": own, "of": own, "measured": {"points_lost": 0.03}},
            "bf16": {"of": own, "measured": {"points_lost": 0.0}},
        }
    }
    (directory / MANIFEST).write_text(json.dumps(manifest))
    return directory, manifest


def test_variants_are_read_opened_and_change_no_fingerprint(varied: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = varied
    pack = load_pack(directory)
    pack.verify()
    assert pack.recognition.fingerprint() == load_pack(BUNDLED).recognition.fingerprint()
    assert {v.precision: v.points_lost for v in pack.recognition.variants} == {"int8": 0.03, "bf16": 0.0}
    assert open_network(pack.recognition, Wish(precision="int8")).path == directory / "int8" / "recogniser.onnx"
    assert open_network(pack.recognition, Wish(precision="fp32")).path == directory / "recogniser.onnx"
    assert choose(pack.recognition, Wish(), BOTH) == Choice(
        "openvino", "int8", "the pack has it, and measured a loss of 0.03 points"
    )


def test_what_galleries_lose_is_said_where_int8_is_chosen() -> None:
    """LFW's pairs say less than what a gallery feels."""
    why = choose(load_pack(BUNDLED).recognition, Wish(), BOTH).why
    assert "TAR 73.0% -> 72.1% at FMR 0.1%, FNIR 66.5% -> 67.5% at FPIR 1%" in why
    assert "KITH_PRECISION=bf16" in why


@pytest.mark.parametrize(
    "measured", [{"engines": 3}, {"engines": {"openvino": {"galleries": {"fp32, probes fp32": 1}}}}]
)
def test_a_pack_may_say_anything_of_its_variants(measured: dict[str, Any]) -> None:
    (variant,) = spec({"int8": 0.05}).variants
    assert replace(variant, measured=measured).felt_in_galleries("openvino") is None


class OpenVinoRefuses(OpenVinoNetwork):
    def run(self, batch: Float) -> list[Float]:
        raise RuntimeUnavailableError("OpenVINO cannot run it")


def test_what_openvino_cannot_run_keeps_its_numbers(
    varied: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recognition = load_pack(varied[0]).recognition
    monkeypatch.setattr("models.engines.OpenVinoNetwork", OpenVinoRefuses)
    monkeypatch.setattr("models.engines.abilities", lambda only=None: BOTH)
    chosen = open_network(recognition, Wish())
    assert (chosen.engine, chosen.precision, chosen.path.parent.name) == ("onnxruntime", "int8", "int8")
    assert chosen.why.startswith("OpenVINO cannot run this file; the pack has it")
    pinned = open_network(recognition, Wish(precision="fp32"))
    assert (pinned.engine, pinned.precision) == ("onnxruntime", "fp32")
    with pytest.raises(RuntimeUnavailableError, match="OpenVINO cannot run it"):
        open_network(recognition, Wish(precision="bf16"))


def test_another_recogniser_as_a_variant_is_refused_when_it_is_opened(varied: tuple[Path, dict[str, Any]]) -> None:
    directory, manifest = varied
    manifest["tasks"]["recognition"]["embedding_dimension"] = 7
    (directory / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(PackError, match="is 7") as refused:
        open_network(load_pack(directory).recognition, Wish(precision="int8"))
    assert refused.value.field == "tasks.recognition.embedding_dimension"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sha256": "0" * 64}, "variants.recognition.int8.sha256"),
        ({"of": "0" * 64}, "variants.recognition.int8.of"),
        ({"of": None}, "variants.recognition.int8"),
        ({"file": "int8/other.onnx"}, "variants.recognition.int8.file"),
        ({"measured": {"points_lost": "none"}}, "variants.recognition.int8.measured.points_lost"),
    ],
)
def test_a_variant_that_is_not_the_main_files_is_refused(
    varied: tuple[Path, dict[str, Any]], change: dict[str, Any], field: str
) -> None:
    directory, manifest = varied
    manifest["variants"]["recognition"]["int8"] |= change
    (directory / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(PackError) as refused:
        load_pack(directory).verify()
    assert refused.value.field == field
