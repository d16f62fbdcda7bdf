"""Verification of installed packs: checksums and test runs of the networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.checksums import sha256_of
from models.engines.selection import open_fp32
from models.errors import ModelError, PackError
from models.fields import checked
from models.pack.catalog import CatalogEntry, PackKind
from models.pack.loading import BUNDLED_PACK, LIVENESS_DIR, load_pack
from models.pack.manifest import load_liveness, read_json
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


def read_pull_record(entry: CatalogEntry, models_dir: Path) -> Mapping[str, Any]:
    """Read the record of a pulled pack.

    Raises:
        PackError: the record cannot be read.
    """
    record = read_json(pack_directory(entry, models_dir) / PULL_RECORD)
    checked(dict[str, str], record.get("files"), f"{PULL_RECORD}.files")
    return record


def check_pack(entry: CatalogEntry, models_dir: Path, provider: str | None = None) -> list[PackCheck]:
    """Check an installed pack.

    Files are compared with catalog, record and manifest, and each network runs once.
    """
    checks = check_files(entry, models_dir)
    directory = pack_directory(entry, models_dir)
    try:
        checks.append(PackCheck("networks", True, run_networks(directory, entry.kind, provider)))
    except ModelError as error:
        checks.append(PackCheck("networks", False, str(error)))
    return checks


def check_files(entry: CatalogEntry, models_dir: Path) -> list[PackCheck]:
    """Compare the files of a pulled pack with the catalog and its record."""
    if entry.kind == "bundled":
        return []
    try:
        recorded: dict[str, str] = read_pull_record(entry, models_dir)["files"]
    except PackError as error:
        return [PackCheck(PULL_RECORD, False, f"{error}: pull the pack again")]
    published, directory, checks = entry.known_checksums(), pack_directory(entry, models_dir), []
    for file, expected in sorted((recorded | published).items()):
        source = "in the catalog" if file in published else "recorded by the pull"
        actual = sha256_of(directory / file) if (directory / file).is_file() else "missing"
        ok = actual == expected
        detail = f"has the sha256 {source}" if ok else f"is {actual[:12]}, not {expected[:12]} {source}: pull it again"
        checks.append(PackCheck(file, ok, detail))
    return checks


def run_networks(directory: Path, kind: PackKind = "files", provider: str | None = None) -> str:
    """Load a pack of the catalog's ``kind``, verify it and run each network once; return a summary.

    Raises:
        PackError: the pack or a network is invalid.
        RuntimeUnavailableError: the runtime is missing.
    """
    specs: list[NetworkSpec]
    if kind == "liveness":
        specs, summary = [load_liveness(directory)], ""
    else:
        pack = load_pack(directory)
        pack.verify()
        specs = [*pack.specs.values()]
        ignored = f"; ignored {', '.join(pack.ignored)}" if pack.ignored else ""
        summary = f"; embeddings have {pack.recognition.dimension} dimensions{ignored}"
    for spec in specs:
        check_outputs(spec, open_fp32(spec.path, provider))
    return f"ran {', '.join(spec.path.name for spec in specs)}{summary}"
