"""Verification of installed packs: checksums and test runs of the networks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.checksums import sha256_of
from models.engines.selection import open_fp32
from models.errors import ModelError, PackError
from models.pack.catalog import CatalogEntry
from models.pack.loading import BUNDLED_PACK, LIVENESS_DIR, load_pack
from models.pack.manifest import load_liveness, verify_file
from models.vision.output_check import check_outputs
from models.vision.specs import NetworkSpec

PULL_RECORD: Final = "kith-pull.json"
"""Record in a pulled pack: sources of the downloads and the sha256 of every file."""


@dataclass(frozen=True)
class PackCheck:
    """Result of one check of a pack."""

    what: str
    ok: bool
    detail: str


def pack_directory(entry: CatalogEntry, models_dir: Path) -> Path:
    """Return the directory of an installed pack, whether or not it exists."""
    match entry.kind:
        case "bundled":
            return BUNDLED_PACK.parent / entry.name
        case "liveness":
            return models_dir / LIVENESS_DIR / entry.name
        case _:
            return models_dir / entry.name


def is_present(entry: CatalogEntry, models_dir: Path) -> bool:
    """Tell whether a pack is bundled or has been pulled."""
    directory = pack_directory(entry, models_dir)
    return directory.is_dir() if entry.kind == "bundled" else (directory / PULL_RECORD).is_file()


def read_pull_record(entry: CatalogEntry, models_dir: Path) -> dict[str, Any]:
    """Read the record of a pulled pack.

    Raises:
        PackError: the record cannot be read.
    """
    path = pack_directory(entry, models_dir) / PULL_RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        record["files"].items()
    except (OSError, UnicodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackError(PULL_RECORD, f"of {entry.name} cannot be read ({error}): pull it again") from error
    return record


def check_pack(entry: CatalogEntry, models_dir: Path, provider: str | None = None) -> list[PackCheck]:
    """Check an installed pack.

    Files are compared with catalog, record and manifest, and each network runs once.
    """
    checks = check_files(entry, models_dir)
    directory = pack_directory(entry, models_dir)
    try:
        run = run_liveness if entry.kind == "liveness" else run_networks
        checks.append(PackCheck("networks", True, run(directory, provider)))
    except ModelError as error:
        checks.append(PackCheck("networks", False, str(error)))
    return checks


def check_files(entry: CatalogEntry, models_dir: Path) -> list[PackCheck]:
    """Compare the files of a pulled pack with the catalog and its record."""
    if entry.kind == "bundled":
        return []
    if not is_present(entry, models_dir):
        return [PackCheck("files", False, f"{entry.name} has not been pulled")]
    try:
        recorded: dict[str, str] = read_pull_record(entry, models_dir)["files"]
    except PackError as error:
        return [PackCheck(PULL_RECORD, False, str(error))]
    published, directory, checks = entry.known_checksums(), pack_directory(entry, models_dir), []
    for file in sorted({*recorded, *published}):
        expected = published.get(file) or recorded[file]
        source = "in the catalog" if file in published else "recorded by the pull"
        if not (directory / file).is_file():
            checks.append(PackCheck(file, False, "is missing: pull the pack again"))
        elif (actual := sha256_of(directory / file)) == expected:
            checks.append(PackCheck(file, True, f"has the sha256 {source}"))
        else:
            detail = f"has sha256 {actual[:12]}..., not {expected[:12]}... {source}: pull the pack again"
            checks.append(PackCheck(file, False, detail))
    return checks


def run_networks(directory: Path, provider: str | None = None) -> str:
    """Load a pack, verify it and run each network once; return a summary.

    Raises:
        PackError: the pack or a network is invalid.
        RuntimeUnavailableError: the runtime is missing.
    """
    pack = load_pack(directory)
    pack.verify()
    specs: list[NetworkSpec] = [pack.detection, pack.recognition, *([pack.liveness] if pack.liveness else [])]
    for spec in specs:
        check_outputs(spec, open_fp32(spec.path, provider))
    count = "both networks" if pack.liveness is None else "all three networks"
    ignored = f"; ignored {', '.join(pack.ignored)}" if pack.ignored else ""
    return f"{count} ran; embeddings have {pack.recognition.dimension} dimensions{ignored}"


def run_liveness(directory: Path, provider: str | None = None) -> str:
    """Load a pulled liveness network, verify it and run it once; return a summary.

    Raises:
        PackError: the network is invalid.
        RuntimeUnavailableError: the runtime is missing.
    """
    spec = load_liveness(directory)
    verify_file(spec.path, spec.sha256, "tasks.liveness.sha256")
    check_outputs(spec, open_fp32(spec.path, provider))
    return "the liveness network ran"
