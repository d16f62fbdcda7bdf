"""Writing and updating of model packs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import PackError
from models.pack.loading import load_pack
from models.pack.manifest import (
    CALIBRATION_FILE,
    LICENSE_FILE,
    MANIFEST_FILE,
    MANIFEST_VERSION,
    ModelPack,
    read_manifest,
)
from models.runtime.network import network_sha256


def write_pack(
    directory: Path,
    model_id: str,
    display_name: str,
    tasks: Mapping[str, Mapping[str, Any]],
    calibration: Mapping[str, Any],
    provenance: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> ModelPack:
    """Write manifest and calibration of a pack whose networks are already in ``directory``, and load it.

    Args:
        tasks: fields of each task in the manifest, without the checksum of its file.

    Raises:
        PackError: the result does not load. The manifest is removed, the other files remain for inspection.
    """
    (directory / CALIBRATION_FILE).write_text(json.dumps(calibration) + "\n", encoding="utf-8")
    document = {
        "manifest_version": MANIFEST_VERSION,
        "model_id": model_id,
        "display_name": display_name,
        "license": LICENSE_FILE,
        "tasks": {
            task: {"file": fields["file"], "sha256": network_sha256(directory / fields["file"]), **fields}
            for task, fields in tasks.items()
        },
        "calibration": CALIBRATION_FILE,
        "provenance": provenance,
        "metrics": metrics,
    }
    manifest = directory / MANIFEST_FILE
    manifest.unlink(missing_ok=True)
    return write_verified(manifest, document)


def update_manifest(directory: Path, provenance: Mapping[str, Any], metrics: Mapping[str, Any]) -> ModelPack:
    """Replace provenance and metrics of a pack, and load it.

    Raises:
        PackError: the pack has no manifest of version 2.
    """
    document = read_manifest(directory)
    if document is None:
        problem = f"{directory} has none of version {MANIFEST_VERSION}: only packs with a manifest can be updated"
        raise PackError(MANIFEST_FILE, problem)
    return write_verified(directory / MANIFEST_FILE, {**document, "provenance": provenance, "metrics": metrics})


def write_verified(file: Path, document: Mapping[str, Any]) -> ModelPack:
    """Replace a file of a pack and load the pack. Raises PackError if it does not load; the file is unchanged."""
    before = file.read_text(encoding="utf-8") if file.is_file() else None
    _replace_file(file, json.dumps(document, indent=2))
    try:
        pack = load_pack(file.parent)
        pack.verify()
    except PackError:
        if before is None:
            file.unlink()
        else:
            _replace_file(file, before.rstrip("\n"))
        raise
    return pack


def replace_calibration(pack: ModelPack, calibration: Mapping[str, Any]) -> ModelPack:
    """Replace a pack's calibration atomically, and load the pack. Raises OSError: the directory is not writable."""
    document = read_manifest(pack.directory)
    _replace_file(pack.directory / CALIBRATION_FILE, json.dumps(calibration))
    if document and document.get("calibration") != CALIBRATION_FILE:
        updated = {**document, "calibration": CALIBRATION_FILE}
        _replace_file(pack.directory / MANIFEST_FILE, json.dumps(updated, indent=2))
    return load_pack(pack.directory)


def _replace_file(path: Path, text: str) -> None:
    """Write a file atomically."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
