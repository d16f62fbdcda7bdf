"""Packs of the catalogue on this machine: pulled, checked, and found again by name."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final

import numpy as np

from models import insightface_licence
from models.archives import extract_tar, extract_zip
from models.catalog import Download, Entry
from models.detection import Detector
from models.download import Downloader, Fetched, Progress
from models.errors import LicenceNotAcceptedError, ModelError, PackError
from models.liveness import Liveness
from models.pack import BUNDLED, load_pack, sha256_of
from models.package_index import find_file
from models.recognition import Recogniser
from models.runtime import OnnxNetwork

RECORD: Final = "kith-pull.json"
"""Beside a pulled pack's files: what was fetched, from where, and every file's sha256."""
WORK: Final = ".pull"
"""In the models directory: locks, and downloads that are not finished."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    what: str
    ok: bool
    detail: str


def directory_of(entry: Entry, models_dir: Path) -> Path:
    """Where the pack lies, or would lie."""
    return BUNDLED.parent / entry.name if entry.kind == "bundled" else models_dir / entry.name


def is_present(entry: Entry, models_dir: Path) -> bool:
    directory = directory_of(entry, models_dir)
    return directory.is_dir() if entry.kind == "bundled" else (directory / RECORD).is_file()


def pull(
    entry: Entry,
    models_dir: Path,
    accepted: bool = False,
    progress: Progress | None = None,
    downloader: Downloader | None = None,
) -> Path:
    """Bring a pack here, whole or not at all; what an interrupted call has fetched is used by the next.

    Of two processes that pull one pack the second waits, and finds it there. A pack that is here and undamaged is not
    fetched again.

    Args:
        accepted: the caller has read the licence and accepts it, where that is asked for.
        progress: told of every chunk.

    Raises:
        PullError: the licence was not accepted, or the pack cannot be fetched.
        PackError: what was fetched is no pack that runs here.
        RuntimeUnavailableError: there is no inference runtime to try it with.
    """
    directory = directory_of(entry, models_dir)
    if entry.kind == "bundled":
        return directory
    if entry.licence.acceptance and not accepted:
        licence = entry.licence
        raise LicenceNotAcceptedError(f"{entry.name} is under {licence.name} ({licence.url}): {licence.allows}")
    with _locked(models_dir, entry.name) as work:
        if all(finding.ok for finding in _check_files(entry, models_dir)):
            return directory
        with downloader or Downloader() as client:
            fetched = [_fetch(client, download, work, progress) for download in entry.downloads]
        fresh = work / "pack"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        _assemble(entry, work, fresh, fetched)
        _record(entry, fresh, fetched, accepted)
        _try(fresh)
        # A damaged pack of that name makes way; a process that serves it keeps the files it has open.
        shutil.rmtree(directory, ignore_errors=True)
        fresh.rename(directory)
        shutil.rmtree(work)
    return directory


@contextmanager
def _locked(models_dir: Path, name: str) -> Iterator[Path]:
    """A folder for this pack's downloads, for one process at a time."""
    try:
        (models_dir / WORK / name).mkdir(parents=True, exist_ok=True)
        lock = (models_dir / WORK / f"{name}.lock").open("w")
    except OSError as error:
        raise PackError("models_dir", f"{models_dir} cannot be written ({error.strerror})") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Whoever held the lock before may have finished, and taken the folder away.
        (models_dir / WORK / name).mkdir(exist_ok=True)
        yield models_dir / WORK / name


def _fetch(client: Downloader, download: Download, work: Path, progress: Progress | None) -> Fetched:
    target = work / download.file
    if target.is_file() and download.sha256 is not None and sha256_of(target) == download.sha256:
        return Fetched(target.name, "an earlier call", download.sha256, target.stat().st_size)
    url = download.url or find_file(client, str(download.project), download.file)
    return client.fetch(url, target, download.sha256, download.size, progress)


def _assemble(entry: Entry, work: Path, directory: Path, fetched: list[Fetched]) -> None:
    match entry.kind:
        case "zip":
            extract_zip(work / fetched[0].file, entry.downloads[0].members, directory)
        case "dlib":
            # Imported here: the onnx package costs 30 MB of memory.
            from models import dlib_pack

            (member,) = entry.downloads[0].members
            extract_tar(work / fetched[0].file, member, work)
            content = (work / member.file).read_bytes()
            source = {
                "from": fetched[0].file,
                "file": member.file,
                "sha256": sha256_of(work / member.file),
                "licence": entry.licence.name,
            }
            dlib_pack.build(directory, content, source)
        case _:
            for file in fetched:
                (work / file.file).rename(directory / file.file)


def _record(entry: Entry, directory: Path, fetched: list[Fetched], accepted: bool) -> None:
    files = {
        path.relative_to(directory).as_posix(): sha256_of(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    licence = asdict(entry.licence) | {"accepted": accepted}
    document = {
        "pack": entry.name,
        "date": date.today().isoformat(),
        "licence": licence,
        "downloads": [asdict(file) for file in fetched],
        "files": files,
    }
    (directory / RECORD).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_record(entry: Entry, models_dir: Path) -> dict[str, Any]:
    """What was written down when the pack was pulled.

    Raises:
        PackError: it cannot be read.
    """
    path = directory_of(entry, models_dir) / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        record["files"].items()
    except (OSError, UnicodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackError(RECORD, f"of {entry.name} cannot be read ({error}): pull it again") from error
    return record


def check(entry: Entry, models_dir: Path, provider: str | None = None) -> list[Finding]:
    """Is the pack what it was published as, and does it run? Its files against catalogue, record and manifest; both
    networks opened and run once; what InsightFace's library says of its licence, where that is installed."""
    findings = _check_files(entry, models_dir)
    directory = directory_of(entry, models_dir)
    try:
        findings.append(Finding("networks", True, _try(directory, provider)))
    except ModelError as error:
        findings.append(Finding("networks", False, str(error)))
    if entry.kind == "zip" and (found := insightface_licence.inspect(directory, entry.name)) is not None:
        findings.append(Finding("licence", found.ok, found.message))
    return findings


def _check_files(entry: Entry, models_dir: Path) -> list[Finding]:
    if entry.kind == "bundled":
        return []
    if not is_present(entry, models_dir):
        return [Finding("files", False, f"{entry.name} has not been pulled")]
    try:
        recorded: dict[str, str] = read_record(entry, models_dir)["files"]
    except PackError as error:
        return [Finding(RECORD, False, str(error))]
    published, directory, findings = entry.known_checksums(), directory_of(entry, models_dir), []
    for file in sorted({*recorded, *published}):
        wanted = published.get(file) or recorded[file]
        said = "the catalogue says" if file in published else "was recorded when it was pulled"
        if not (directory / file).is_file():
            findings.append(Finding(file, False, "is missing"))
        elif (actual := sha256_of(directory / file)) == wanted:
            findings.append(Finding(file, True, f"has the sha256 that {said}"))
        else:
            findings.append(
                Finding(file, False, f"has sha256 {actual[:12]}..., {wanted[:12]}... {said}: pull it again")
            )
    return findings


def _try(directory: Path, provider: str | None = None) -> str:
    """Open its networks and run each once."""
    pack = load_pack(directory)
    pack.verify()
    # Noise: some networks give a zero vector for an even grey, which has no direction.
    noise = np.random.default_rng(0).integers(0, 256, (256, 320, 3), dtype=np.uint8)
    Detector(OnnxNetwork(pack.detection.path, provider), pack.detection).detect([noise])
    recogniser = Recogniser(OnnxNetwork(pack.recognition.path, provider), pack.recognition)
    side = recogniser.alignment.size_px
    recogniser.embed(np.random.default_rng(0).integers(0, 256, (1, side, side, 3), dtype=np.uint8))
    ran = "both ran"
    if pack.liveness is not None:
        side = pack.liveness.alignment.size_px
        judge = Liveness(OnnxNetwork(pack.liveness.path, provider), pack.liveness)
        judge.scores(np.random.default_rng(0).integers(0, 256, (1, side, side, 3), dtype=np.uint8))
        ran = "all three ran"
    return f"{ran}; embeddings have {recogniser.dimension} dimensions"
