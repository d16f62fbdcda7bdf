"""``kith models``: model packs of the catalog."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape
from rich.progress import DownloadColumn, TaskID, TransferSpeedColumn
from rich.table import Column, Table
from rich.text import Text

from models.errors import PullError
from service.cli.connection import read_settings
from service.cli.options import CommandGroup, OutputOptions, PackName
from service.cli.terminal import (
    make_table,
    print_json,
    print_line,
    print_note,
    print_table,
    progress_bar,
    stdout_console,
)

if TYPE_CHECKING:
    from models.pack.catalog import CatalogEntry
    from models.pack.download import Progress
    from models.pack.quantization import Int8Result
    from models.vision.photo_reading import PhotoReader
    from service.settings import Settings

COMMERCIAL_LABELS: Final = {True: "yes", False: "no", None: "unknown"}
CALIBRATED_RATES: Final = (1e-2, 1e-3)

app = CommandGroup(help="List, download and verify model packs.", no_args_is_help=True)


@app.command("list")
def list_packs(output: OutputOptions) -> None:
    """List the packs of the catalog."""
    settings = read_settings()
    rows = [_summary(entry, settings) for entry in _catalog(settings).values()]
    cells = []
    for row in rows:
        size = None if row["kind"] == "bundled" else _megabytes(row["size"])
        use = COMMERCIAL_LABELS[row["commercial_use"]]
        cells.append((row["name"], _describe_parts(row), use, size, row["here"], row["served"]))
    parts = Column("License and training data of each part", overflow="fold")
    output.answer(rows, make_table("Pack", parts, "Commercial use", "Download", "Installed", "Served", rows=cells))


@app.command()
def show(name: PackName, output: OutputOptions) -> None:
    """Show a pack's license, sources, checksums and accuracy."""
    from models.pack.verification import read_pull_record

    settings = read_settings()
    entry = _find(name, settings)
    row, figures = _summary(entry, settings), _accuracy(entry)
    if not output.as_json:
        _print_pack(entry, row, figures, settings)
        return
    record = read_pull_record(entry, settings.models_path) if row["here"] and entry.kind != "bundled" else None
    print_json(row | asdict(entry) | {"figures": dict(figures), "pulled": record})


def _print_pack(entry: CatalogEntry, row: dict[str, Any], figures: list[tuple[str, str]], settings: Settings) -> None:
    table = Table("What", Column("Detail", overflow="fold"), show_header=False)
    table.add_row("Pack", f"{entry.name}: {entry.about}")
    table.add_row("License", f"{entry.license.name}, {entry.license.url}")
    for part in entry.parts:
        table.add_row(part.part.capitalize(), f"{part.license}; trained on {part.training_data}")
    table.add_row("Permits", entry.license.allows)
    table.add_row("Commercial use", COMMERCIAL_LABELS[entry.commercial_use])
    if entry.license.acceptance:
        table.add_row("Acceptance", "required before download (--accept-license)")
    for file in entry.downloads:
        table.add_row("Source", f"{file.url}\nsha256 {file.sha256 or 'unknown'}, {_megabytes(file.size)}")
        for member in file.members:
            checksum = f"sha256 {member.sha256 or 'unknown'}, {_megabytes(member.size)}"
            table.add_row("Extracted", f"{member.file}\n{checksum}")
    _add_installation(table, entry, row, settings)
    for label, value in figures:
        table.add_row(label, value)
    stdout_console().print(table)


@app.command()
def pull(
    output: OutputOptions,
    name: Annotated[str | None, typer.Argument(help="Pack name.")] = None,
    liveness: Annotated[
        str | None, typer.Option(help="Liveness network to download too, or alone: minifasnet.")
    ] = None,
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="Accept the pack's license, which you have read.")
    ] = False,
) -> None:
    """Download a pack or a liveness network, verify its checksums, and test its networks. Run it again to resume."""
    settings = read_settings()
    packs, networks = ([] if chosen is None else [_find(chosen, settings)] for chosen in (name, liveness))
    if not packs and not networks:
        raise typer.BadParameter("Name a pack, or a liveness network with --liveness.")
    for entry in (*packs, *networks):
        if (entry.kind == "liveness") != (entry in networks):
            raise typer.BadParameter(f"Pull {entry.name} with '{_pull_command(entry)}'.")
    pulled = [_pull(entry, settings, accept_license, output.as_json) for entry in (*packs, *networks)]
    if output.as_json:
        print_json(pulled[0] if len(pulled) == 1 else pulled)


def _pull_command(entry: CatalogEntry) -> str:
    return f"kith models pull {'--liveness ' if entry.kind == 'liveness' else ''}{entry.name}"


def _pull(entry: CatalogEntry, settings: Settings, accept_license: bool, silent: bool) -> dict[str, Any]:
    from models.pack.pull import pull as pull_pack
    from models.pack.verification import is_present, read_pull_record

    accepted = accept_license or is_present(entry, settings.models_path)
    with _file_progress() as advance:
        directory = pull_pack(entry, settings.models_path, accepted, advance)
    record = {} if entry.kind == "bundled" else read_pull_record(entry, settings.models_path)
    if not silent:
        _report_pull(entry, directory)
    return {"name": entry.name, "directory": str(directory), "pulled": record or None}


def _report_pull(entry: CatalogEntry, directory: Path) -> None:
    from models.pack.loading import load_pack
    from models.runtime.onnx_runtime import has_fast_int8

    if entry.kind == "liveness":
        print_line(f"Installed {entry.name} in {directory}. Servers use it from their next start, beside any pack.")
        return
    print_line(f"Installed {entry.name} in {directory}. Serve it with KITH_PACK={entry.name}.")
    pack = load_pack(directory)
    if pack.calibration is None:
        print_note(
            f"{entry.name} has no calibration. Calibrate it on photos without names: 'kith models calibrate "
            f"{entry.name} --photos FOLDER'."
        )
    if has_fast_int8() and not pack.has_int8:
        print_note(f"INT8 may be faster on this processor: 'kith models quantize {entry.name} --photos FOLDER'.")


@app.command()
def verify(
    output: OutputOptions,
    name: Annotated[str | None, typer.Argument(help="Pack. Default: all installed packs.")] = None,
) -> None:
    """Verify the checksums of packs, and run both networks once.

    Exit status 1 if a check fails."""
    from models.pack.verification import check_pack, is_present

    settings = read_settings()
    if name is not None:
        entries = [_find(name, settings)]
    else:
        entries = [entry for entry in _catalog(settings).values() if is_present(entry, settings.models_path)]
    found = {entry.name: check_pack(entry, settings.models_path, settings.wish.provider) for entry in entries}
    rows = (
        (pack, finding.what, Text("ok", "green") if finding.ok else Text("error", "red"), finding.detail)
        for pack, findings in found.items()
        for finding in findings
    )
    output.answer(
        {pack: [asdict(finding) for finding in findings] for pack, findings in found.items()},
        make_table("Pack", "Check", "", "Detail", rows=rows),
        ok=all(finding.ok for findings in found.values() for finding in findings),
    )


@app.command()
def calibrate(
    name: PackName,
    photos: Annotated[Path, typer.Option(help="Folder of photos without names.", exists=True, file_okay=False)],
    output: OutputOptions,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the pack's calibration.")] = False,
) -> None:
    """Calibrate an installed pack on photos without names."""
    from models.errors import PackError
    from models.pack.loading import find_pack, load_pack
    from models.pack.unlabeled_photos import calibrate_without_names
    from models.pack.writing import replace_calibration
    from models.risk.calibration import Calibration
    from models.runtime.onnx_check import is_bundled

    pack = load_pack(find_pack(Path(name), read_settings().models_path))
    if is_bundled(pack.directory):
        raise PackError("calibration", "bundled packs keep their calibration. Copy the pack to calibrate it")
    if pack.calibration is not None and not replace:
        raise PackError("calibration", f"{name} has one. Replace it with --replace")
    with _noting_unreadable() as reader:
        document = calibrate_without_names(pack, photos, reader)
    replace_calibration(pack, document)

    def print_text() -> None:
        print_line(f"Calibrated {name} on {document['faces']:,} faces of {document['photos']:,} photos.")
        calibration = Calibration.from_document(document)
        rows = ((f"{rate:.1%}", calibration.curve.threshold_at_fmr(rate).value) for rate in CALIBRATED_RATES)
        print_table(make_table("FMR", "Threshold", rows=rows))

    figures = {key: document[key] for key in ("faces", "photos", "copies", "repeated_share")}
    output.answer(figures | {"unreadable_count": len(reader.unreadable)}, print_text)


@app.command()
def quantize(
    name: PackName,
    output: OutputOptions,
    photos: Annotated[
        Path | None,
        typer.Option(help="Folder of typical photos. Default: the demo's photos.", exists=True, file_okay=False),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the pack's INT8 files.")] = False,
) -> None:
    """Write INT8 files of an installed pack for fast inference on this machine, and measure their loss.

    Exit status 1 if a network loses too much or is no faster: it gets no INT8 file."""
    from models.errors import PackError
    from models.pack.int8_samples import spread
    from models.pack.loading import find_pack, load_pack
    from models.pack.quantization import quantize_pack
    from models.runtime.onnx_check import is_bundled
    from service.cli.tools.demo import varied_samples

    settings = read_settings()
    pack = load_pack(find_pack(Path(name), settings.models_path))
    if is_bundled(pack.directory):
        raise PackError("int8", "bundled packs come with the INT8 files that lose little")
    if pack.has_int8 and not replace:
        raise PackError("int8", f"{name} has INT8 files. Replace them with --replace")
    note = "the demo's photos" if photos is None else photos.resolve().name
    with _noting_unreadable() as reader:
        sample = varied_samples() if photos is None else spread(photos, reader)
        results = quantize_pack(pack, sample, settings.wish, note)
    output.answer(
        [asdict(result) | {"accepted": result.accepted} for result in results],
        lambda: _print_quantization(results),
        ok=all(result.accepted for result in results),
    )


@contextmanager
def _noting_unreadable() -> Iterator[PhotoReader]:
    """Print a note on photos that cannot be read, also if the command fails: they may be why."""
    from models.vision.photo_reading import PhotoReader

    reader = PhotoReader()
    try:
        yield reader
    finally:
        if reader.unreadable:
            print_note(f"{reader.describe()}.")


def _print_quantization(results: Sequence[Int8Result]) -> None:
    from models.pack.quantization import describe_loss

    rows = []
    for result in results:
        layers = f"{result.fp32_layers} of {result.layers}"
        for engine, measured in result.engines.items():
            mark = Text("ok", "green") if measured["accepted"] else Text("too much", "red")
            speed = f"{result.speedup:.1f} x" if engine == result.engine else None
            rows.append((result.task, layers, engine, describe_loss(measured), speed, mark))
    print_table(make_table("Network", "Layers in fp32", "Engine", "Loss", "Speed", "", rows=rows))
    for result in results:
        if not result.accepted:
            too_lossy = not result.engines[result.engine]["accepted"]
            why = "loses too much: try --photos with more photos" if too_lossy else "is no faster on this machine"
            print_note(f"{result.task}: no INT8 file was written. INT8 {why}.")
    if any(result.task == "recognition" and result.accepted for result in results):
        print_note(
            "Galleries enrolled so far keep their vectors, and are searched with INT8 ones from the next start: the "
            "cosine above is what that changes. KITH_RUNTIME=fp32 avoids it."
        )


def _catalog(settings: Settings) -> dict[str, CatalogEntry]:
    from models.pack import catalog

    mirrors = settings.models_path / catalog.CATALOG_PATH.name
    return catalog.read_catalog(mirrors if mirrors.exists() else catalog.CATALOG_PATH)


def _find(name: str, settings: Settings) -> CatalogEntry:
    if (entry := _catalog(settings).get(name)) is None:
        raise PullError("pack_unknown", f"the catalog has no pack {name!r}")
    return entry


def _summary(entry: CatalogEntry, settings: Settings) -> dict[str, Any]:
    from models.pack.verification import is_present, pack_directory

    directory = pack_directory(entry, settings.models_path)
    here = is_present(entry, settings.models_path)
    return {
        "name": entry.name,
        "kind": entry.kind,
        "license": entry.license.name,
        "parts": [asdict(part) for part in entry.parts],
        "commercial_use": entry.commercial_use,
        "size": entry.size,
        "here": here,
        "served": here and settings.pack_paths[0].expanduser().resolve() == directory.resolve(),
        "directory": str(directory) if here else None,
    }


def _describe_parts(row: Mapping[str, Any]) -> str:
    parts = [f"{part['part']}: {part['license']} ({part['training_data']})" for part in row["parts"]]
    return "\n".join(parts) or str(row["license"])


def _add_installation(table: Table, entry: CatalogEntry, row: dict[str, Any], settings: Settings) -> None:
    from models.pack.loading import load_pack
    from models.pack.verification import pack_directory

    if not row["here"]:
        table.add_row("Installed", f"no: run '{_pull_command(entry)}'")
        return
    table.add_row("Installed", f"{row['directory']}{', served' if row['served'] else ''}")
    if entry.kind == "liveness":
        return
    calibrated = load_pack(pack_directory(entry, settings.models_path)).calibration is not None
    table.add_row("Calibrated", "yes: accepts risks" if calibrated else "no: accepts explicit thresholds only")


def _accuracy(entry: CatalogEntry) -> list[tuple[str, str]]:
    """Return the measured accuracy of packs that were evaluated."""
    if entry.kind not in ("bundled", "openvino"):
        return []
    from models.pack.evidence import accuracy_rows, read_evidence
    from models.pack.loading import BUNDLED_PACK, load_pack

    bundled = entry.kind == "bundled"
    own = BUNDLED_PACK.parent / entry.name
    return accuracy_rows(load_pack(own).metrics if bundled else read_evidence(entry.name)["metrics"])


@contextmanager
def _file_progress() -> Iterator[Progress]:
    """Show a progress bar per file."""
    with progress_bar(DownloadColumn(), TransferSpeedColumn()) as progress:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(escape(name), total=total)
            progress.update(tasks[name], completed=done, total=total)

        yield advance


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:.1f} MB"
