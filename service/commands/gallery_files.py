"""``kith gallery export | import``: galleries as files."""

from __future__ import annotations

import gzip
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import DownloadColumn, TransferSpeedColumn

from service.commands.options import AsJson, GalleryName, Key, Url
from service.commands.remedies import remedies_of
from service.connection import connect
from service.files import replacing
from service.terminal import SAID_NO, print_json, progress, say


def export(
    name: GalleryName,
    file: Annotated[Path, typer.Argument(help="FILE.ndjson, FILE.ndjson.gz or FILE.parquet.")],
    embeddings: Annotated[bool, typer.Option(help="Without: subjects and metadata alone.")] = True,
    crops: Annotated[bool, typer.Option("--crops", help="With the faces that the gallery keeps.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Write a gallery as it is at this moment to a file, which is there when it is complete."""
    kind = _transfer_format(file)
    with connect(url, api_key) as kith:
        gallery = kith.gallery(name)
        # A file's lines tell how far it is; Parquet has none.
        lines = 1 + gallery.templates if kind == "ndjson" else None
        with replacing(file) as plain, progress(DownloadColumn(), TransferSpeedColumn(), transient=True) as shown:
            packed = gzip.GzipFile(fileobj=plain, mode="wb", compresslevel=1) if file.suffix == ".gz" else None
            bar, sent, seen = shown.add_task("receiving", total=None), 0, 0
            with packed or nullcontext(plain) as to:
                for piece in kith.export_gallery(name, kind, embeddings=embeddings, crops=crops):
                    to.write(piece)
                    sent, seen = sent + len(piece), seen + piece.count(b"\n")
                    whole = None if lines is None or not seen else max(sent, sent * lines // seen)
                    shown.update(bar, completed=sent, total=whole)
    size = file.stat().st_size
    if as_json:
        print_json({"file": str(file), "bytes": size, "subjects": gallery.subjects, "templates": gallery.templates})
    else:
        say(f"wrote {file}, {size:,} bytes")


def take(
    name: GalleryName,
    file: Annotated[Path, typer.Argument(help="As export writes, or your own.", exists=True, dir_okay=False)],
    create: Annotated[bool, typer.Option("--create", help="Make the gallery if there is none.")] = False,
    recogniser: Annotated[
        str | None, typer.Option(help="Whose vectors these are, where the file does not say.")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Take a file's people into a gallery.

    Run again to resume: templates are taken once. Exit 1 if an item was refused."""
    _transfer_format(file)
    with connect(url, api_key) as kith, progress(DownloadColumn(), TransferSpeedColumn(), transient=True) as shown:
        bar = shown.add_task("sending", total=file.stat().st_size)
        advance = partial(shown.advance, bar)
        report = kith.import_gallery(name, file, create=create, recogniser=recogniser, progress=advance)
    if as_json:
        print_json(report)
    else:
        say(
            f"{report.templates} templates of {report.subjects} new subjects imported, {report.present} were there, "
            f"{report.refused} refused"
        )
        for refusal in report.refusals:
            say(f"  item {refusal.item}: {refusal.error.code}: {refusal.error.detail}")
        for line in remedies_of(refusal.error.model_dump() for refusal in report.refusals):
            say(line)
    if report.refused:
        raise typer.Exit(SAID_NO)


def _transfer_format(file: Path) -> Literal["ndjson", "parquet"]:
    if file.suffix == ".parquet":
        return "parquet"
    if file.name.endswith((".ndjson", ".ndjson.gz", ".jsonl", ".jsonl.gz")):
        return "ndjson"
    raise typer.BadParameter(f"{file.name}: expected .ndjson, .ndjson.gz or .parquet", param_hint="FILE")
