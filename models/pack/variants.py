"""INT8 files of a pack, and their entries in its manifest."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from models.checksums import sha256_of
from models.pack.manifest import ModelPack
from models.runtime.dynamic_shapes import make_dynamic
from models.runtime.network import Float
from models.runtime.onnx_files import finalize_onnx, restore_fp32_weights
from models.runtime.quantization import Quantizer
from models.vision.specs import NetworkSpec, RecognitionSpec

INT8_FOLDER: Final = "int8"
"""Subfolder of a pack: InsightFace opens every ONNX file beside the manifest."""


def networks_of(pack: ModelPack) -> dict[str, NetworkSpec]:
    """Return the networks that can have variants, by task of the manifest."""
    return {"detection": pack.detection, "recognition": pack.recognition}


@contextmanager
def quantizing(spec: NetworkSpec, batches: Iterable[Float], dynamic: bool = False) -> Iterator[Quantizer]:
    """Yield a quantizer of a network, whose temporary files are removed at the end.

    Args:
        dynamic: quantize the network with open batch and sides, as `make_dynamic` writes it.
    """
    with tempfile.TemporaryDirectory(dir=spec.path.parent) as work:
        wide = Path(work) / "wide.onnx"
        restore_fp32_weights(spec.path, wide)
        if dynamic and (graph := make_dynamic(wide)) is not None:
            wide.write_bytes(graph)
        # A recognizer's batch has many faces. A detector's photo is a batch of its own, and its faces are rare.
        yield Quantizer(wide, batches, Path(work), isinstance(spec, RecognitionSpec))


def write_int8(quantizer: Quantizer, spec: NetworkSpec, target: Path, excluded: Collection[str]) -> None:
    """Write the INT8 file of a network, whose ``excluded`` layers stay fp32."""
    quantizer.write(target, excluded)
    finalize_onnx(target, target, {"kith.int8_of": sha256_of(spec.path)})


def int8_path(spec: NetworkSpec) -> Path:
    """Return the path of a network's INT8 file, and create its folder."""
    folder = spec.path.parent / INT8_FOLDER
    folder.mkdir(exist_ok=True)
    return folder / spec.path.name


def remove_unlisted_int8(pack: ModelPack) -> None:
    """Delete the INT8 files that the pack does not name, such as those of an interrupted quantization."""
    listed = {variant.path for spec in networks_of(pack).values() for variant in spec.variants}
    for file in (pack.directory / INT8_FOLDER).glob("*.onnx"):
        if file not in listed:
            file.unlink()


def other_entries(pack: ModelPack, spec: NetworkSpec) -> dict[str, Any]:
    """Return the manifest's entries of a network's variants in precisions other than INT8."""
    return {
        variant.precision: {
            **({} if variant.path is None else {"file": pack.name_of(variant.path), "sha256": variant.sha256}),
            "of": variant.of,
            "measured": dict(variant.measured),
        }
        for variant in spec.variants
        if variant.precision != "int8"
    }


def int8_entry(pack: ModelPack, spec: NetworkSpec, file: Path, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's entry of an INT8 file."""
    own = {"file": pack.name_of(file), "sha256": sha256_of(file), "of": sha256_of(spec.path)}
    return {**own, "measured": dict(measured)}
