"""Options and arguments that several commands share, and option groups."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_type_hints

import typer
from rich.table import Table

from kith.wire.common import Detail, EventType, IdentifyOutcome, Preset
from service.cli.terminal import EXIT_NO, print_json, print_line, print_table
from service.core.atomic_files import atomic_write

if TYPE_CHECKING:
    from kith.options import Risk


def check_file(path: Path | None, option: str, *suffixes: str) -> None:
    """Raises typer.BadParameter: a file to write has none of the suffixes, or is in no folder."""
    if path is not None and (path.suffix.lower() not in suffixes or not path.parent.is_dir()):
        kinds = " or ".join(suffixes)
        raise typer.BadParameter(f"{path} must be a {kinds} file in an existing folder.", param_hint=option)


JsonFile = Annotated[Path | None, typer.Argument(help="JSON file. Default: stdout.", dir_okay=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")]
GalleryOption = Annotated[str, typer.Option("--gallery", "-g", help="Gallery.")]
GalleryArgument = Annotated[str, typer.Argument(metavar="GALLERY", help="Gallery name.")]
GalleryFilter = Annotated[str | None, typer.Option("--gallery", "-g", help="Only this gallery.")]
Subject = Annotated[str, typer.Argument(help="Subject id.")]
JobId = Annotated[str, typer.Argument(help="Job id, from 'kith jobs list'.")]
KeyId = Annotated[str, typer.Argument(help="Key id, from 'kith keys list'.")]
PackName = Annotated[str, typer.Argument(help="Pack name, from 'kith models list'.")]
StrangerId = Annotated[str, typer.Argument(help="Stranger id, from 'kith stranger list'.")]
TemplateId = Annotated[str, typer.Argument(help="Template id, from 'kith template list'.")]
WebhookId = Annotated[str, typer.Argument(help="Webhook id, from 'kith webhook list'.")]
EventTypes = Annotated[
    list[str] | None,
    typer.Option("--type", help=f"Only events of these types: {', '.join(get_args(EventType))}."),
]
Outcomes = Annotated[
    list[str] | None,
    typer.Option("--outcome", help=f"Only decisions with these outcomes: {', '.join(get_args(IdentifyOutcome))}."),
]
MinRisk = Annotated[float | None, typer.Option(min=0, max=1, help="Minimum false alarm probability of decisions.")]
OnlyGalleries = Annotated[list[str] | None, typer.Option("--gallery", "-g", help="Only this gallery; repeatable.")]
DetailOption = Annotated[
    Detail | None,
    typer.Option(
        "--detail",
        help="Effort of face detection: medium (also rotated photos, close faces), high (also small faces in large "
        "photos). Default: the server's.",
    ),
]
PhotosOrFolders = Annotated[list[Path], typer.Argument(help="Photos, or folders of photos at any depth.", exists=True)]
Photos = Annotated[list[Path], typer.Argument(help="One or more photos.", exists=True, dir_okay=False)]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Option of every command that prints an answer."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False

    def answer(self, document: Any, text: str | Table | Callable[[], None], ok: bool = True) -> None:
        """Print ``document`` with --json, or else ``text``, which may be a function that prints.

        Raises:
            typer.Exit: not ``ok``: the exit status is EXIT_NO.
        """
        if self.as_json:
            print_json(document)
        elif isinstance(text, str):
            print_line(text)
        elif isinstance(text, Table):
            print_table(text)
        else:
            text()
        if not ok:
            raise typer.Exit(EXIT_NO)

    def write(self, document: Any, file: Path | None) -> None:
        """Write ``document`` as JSON to a file that only the owner can read, or print it."""
        if file is None:
            print_json(document)
            return
        with atomic_write(file) as target:
            target.write(json.dumps(document, indent=2).encode())
        size = file.stat().st_size
        self.answer({"file": str(file), "bytes": size}, f"Wrote {file}, {size:,} bytes")


@dataclass(frozen=True)
class ServerOptions(OutputOptions):
    """Options of every command that uses a server."""

    address: Annotated[
        str | None, typer.Option("--url", envvar="KITH_URL", help="Server address. Default: the local database.")
    ] = None
    api_key: Annotated[
        str | None, typer.Option(envvar=["KITH_CLIENT_KEY", "KITH_API_KEY"], help="API key for --url.")
    ] = None


@dataclass(frozen=True)
class RiskOptions:
    """Accepted risk of a decision: at most one of these options."""

    fpir: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Accepted share of searches that name a stranger, such as 0.001."),
    ] = None
    fmr: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Accepted share of comparisons that match two people, such as 0.001."),
    ] = None
    threshold: Annotated[
        float | None, typer.Option(min=-1.0, max=1.0, help="Similarity threshold instead of a risk, such as 0.4.")
    ] = None
    preset: Annotated[
        Preset | None,
        typer.Option(help="Named risk: strict 1 in 10,000, standard 1 in 1,000, relaxed 1 in 100."),
    ] = None

    def value(self) -> Risk | None:
        """Return the risk as the API takes it, or None if no option was given.

        Raises:
            typer.BadParameter: more than one option was given.
        """
        given = {kind: value for kind, value in asdict(self).items() if value is not None}
        if len(given) > 1:
            raise typer.BadParameter("Give only one of these options.", param_hint=", ".join(f"--{k}" for k in given))
        return cast("Risk", given) if given else None


@dataclass(frozen=True)
class CheckOptions:
    """Checks of an enrollment to skip."""

    allow_duplicate: Annotated[
        bool, typer.Option("--allow-duplicate", help="Accept faces that are enrolled as another subject.")
    ] = False
    allow_inconsistent: Annotated[
        bool, typer.Option("--allow-inconsistent", help="Accept photos unlike the subject's other photos.")
    ] = False
    allow_low_quality: Annotated[
        bool, typer.Option("--allow-low-quality", help="Accept photos below the gallery's quality gate.")
    ] = False
    allow_not_live: Annotated[
        bool, typer.Option("--allow-not-live", help="Accept faces that fail the gallery's liveness check.")
    ] = False

    def allowed(self) -> dict[str, bool]:
        """Return which checks to skip."""
        return {name: getattr(self, name) for name in CheckOptions.__dataclass_fields__}


@dataclass(frozen=True)
class EnrollmentOptions(CheckOptions):
    """Choice of face, checks to skip, and effort of face detection."""

    largest_face: Annotated[
        bool, typer.Option("--largest-face", help="Enroll the largest face if a photo shows several.")
    ] = False
    detail: DetailOption = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of an enrollment request."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return {"face": "largest" if fields.pop("largest_face") else "only", **fields}


class CommandGroup(typer.Typer):
    """Typer application whose commands take option groups: parameters whose type is a dataclass."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """Register a command, with the fields of its option groups as options."""
        register = super().command(*args, **kwargs)

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            register(_expand_groups(function))
            return function

        return add


def _expand_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose signature has the fields of option groups, after the other parameters."""
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }
    fields = {name: _option_parameters(group) for name, group in groups.items()}

    @functools.wraps(function)
    def run(**values: Any) -> Any:
        given = {
            name: group(**{field.name: values.pop(field.name) for field in fields[name]})
            for name, group in groups.items()
        }
        return function(**values, **given)

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name not in groups
    ]
    parameters += [field for each in fields.values() for field in each]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _option_parameters(group: Any) -> list[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    return [
        parameter.replace(annotation=types[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(group).parameters.values()
    ]
