"""Download and installation of catalog packs."""

from __future__ import annotations

import fcntl
import json
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path, PurePosixPath
from typing import IO, Final

from models.checksums import sha256_of
from models.errors import PullError
from models.pack.catalog import ArchiveMember, CatalogEntry
from models.pack.download import DownloadedFile, Downloader, Progress
from models.pack.verification import PULL_RECORD, check_files, pack_directory, run_networks

WORK_DIR: Final = ".pull"
"""Folder in the models directory for locks and unfinished downloads."""
MAX_MEMBER_BYTES: Final = 1_000_000_000
CHUNK_BYTES: Final = 1 << 20


def pull(
    entry: CatalogEntry,
    models_dir: Path,
    accepted: bool = False,
    progress: Progress | None = None,
    downloader: Downloader | None = None,
) -> Path:
    """Install a pack atomically and return its directory.

    An intact pack is not downloaded again. An interrupted pull resumes. Concurrent pulls of one pack wait for the
    first one.

    Args:
        accepted: the user accepts the license, where acceptance is required.
        progress: called for every chunk.

    Raises:
        OSError: the models directory cannot be written.
        PullError: the license was not accepted, or a download failed.
        PackError: the download is not a valid pack.
        RuntimeUnavailableError: no inference runtime can run the networks.
    """
    directory = pack_directory(entry, models_dir)
    if entry.kind == "bundled":
        return directory
    if entry.license.acceptance and not accepted:
        license = entry.license
        raise PullError(
            "license_not_accepted", f"{entry.name} is under {license.name} ({license.url}): {license.allows}"
        )
    with _locked(models_dir, entry.name) as work:
        if all(check.ok for check in check_files(entry, models_dir)):
            return directory
        with downloader or Downloader() as client:
            files = [client.fetch(d.url, work / d.file, d.sha256, d.size, progress) for d in entry.downloads]
        fresh, replaced = work / "pack", work / "replaced"
        for left in (fresh, replaced):
            shutil.rmtree(left, ignore_errors=True)
        fresh.mkdir()
        _assemble(entry, work, fresh, files)
        _write_record(entry, fresh, files, accepted)
        run_networks(fresh, entry.kind)
        directory.parent.mkdir(exist_ok=True)
        if directory.exists():  # a process that serves the pack keeps its open files
            directory.rename(replaced)
        fresh.rename(directory)
        shutil.rmtree(work, ignore_errors=True)
    return directory


@contextmanager
def _locked(models_dir: Path, name: str) -> Iterator[Path]:
    """Lock and yield the work folder of a pack."""
    work = models_dir / WORK_DIR / name
    work.parent.mkdir(parents=True, exist_ok=True)
    with work.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        work.mkdir(exist_ok=True)
        yield work


def _assemble(entry: CatalogEntry, work: Path, directory: Path, files: list[DownloadedFile]) -> None:
    match entry.kind:
        case "zip":
            _extract_zip(work / files[0].file, entry.downloads[0].members, directory)
        case "openvino":
            # Imported on demand: the onnx package needs 30 MB of memory.
            from models.pack.open_model_zoo import build_open_model_zoo_pack

            xml, weights, detector = (work / file.file for file in files)
            provenance = {
                part: {"from": source.url, "file": file.file, "sha256": file.sha256, "license": entry.license_of(part)}
                for part, source, file in zip(("recognizer", "detector"), entry.downloads[1:], files[1:], strict=True)
            }
            build_open_model_zoo_pack(directory, xml, weights, detector, provenance)
        case "liveness":
            from models.pack.minifasnet import write_minifasnet

            write_minifasnet(directory, [work / file.file for file in files])
        case _:
            for file in files:
                (work / file.file).rename(directory / file.file)


def _write_record(entry: CatalogEntry, directory: Path, files: list[DownloadedFile], accepted: bool) -> None:
    checksums = {
        path.relative_to(directory).as_posix(): sha256_of(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    document = {
        "pack": entry.name,
        "date": date.today().isoformat(),
        "license": asdict(entry.license) | {"accepted": accepted},
        "downloads": [asdict(file) for file in files],
        "files": checksums,
    }
    (directory / PULL_RECORD).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _extract_zip(archive: Path, members: Sequence[ArchiveMember], directory: Path) -> None:
    """Extract members of an archive to ``directory`` under their catalog names, which no name in the archive changes.

    A member matches files whose path ends in its name; the file in the fewest folders wins.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            for member in members:
                with opened.open(_find_member(opened.namelist(), member, archive)) as stream:
                    (directory / member.file).parent.mkdir(parents=True, exist_ok=True)
                    _copy(stream, member, directory / member.file)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise PullError("archive_invalid", f"{archive.name} cannot be read ({error})") from error


def _find_member(names: Sequence[str], member: ArchiveMember, archive: Path) -> str:
    wanted = PurePosixPath(member.file).parts
    matches = [name for name in names if PurePosixPath(name).parts[-len(wanted) :] == wanted]
    depths = [len(PurePosixPath(name).parts) for name in matches]
    shallowest = [name for name, depth in zip(matches, depths, strict=True) if depth == min(depths)]
    if len(shallowest) != 1:
        raise PullError("archive_invalid", f"{archive.name} holds {member.file} {len(shallowest)} times, not once")
    return shallowest[0]


def _copy(stream: IO[bytes], member: ArchiveMember, target: Path) -> None:
    limit = member.size or MAX_MEMBER_BYTES
    with target.open("wb") as out:
        # Archive headers may state false sizes, so the extracted bytes are counted.
        while chunk := stream.read(CHUNK_BYTES):
            if out.tell() + len(chunk) > limit:
                raise PullError("archive_invalid", f"{member.file} is larger than {limit} bytes")
            out.write(chunk)
    if member.sha256 not in (None, actual := sha256_of(target)):
        problem = f"{member.file} has sha256 {actual[:12]}..., {str(member.sha256)[:12]}... was expected"
        raise PullError("archive_invalid", problem)
