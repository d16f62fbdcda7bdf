"""Commands that are one call of the client, as ``kith/calls.py`` describes it, and a text or table of its answer."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from inspect import Parameter, Signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer
from typer.models import ArgumentInfo

from service.cli.connection import connect
from service.cli.options import (
    CommandGroup,
    GalleryOption,
    JobId,
    JsonFile,
    KeyId,
    ServerOptions,
    StrangerId,
    Subject,
    TemplateId,
    WebhookId,
    Yes,
)
from service.cli.terminal import Columns, count_of, list_table, require_confirmation

if TYPE_CHECKING:
    from kith import Kith

TYPES: Final[dict[str, Any]] = {
    "gallery": GalleryOption,
    "into": Annotated[str, typer.Option(help="The one that remains.")],
    "job": JobId,
    "key": KeyId,
    "server": ServerOptions,
    "stranger": StrangerId,
    "subject": Subject,
    "template": TemplateId,
    "webhook": WebhookId,
}
"""Arguments and options of commands, by the names of the call's parameters."""


def add_call(
    app: CommandGroup,
    name: str,
    call: str,
    shows: str | Columns | Callable[..., None] | None,
    /,
    *,
    also: tuple[str, str] = ("", ""),
    check: Callable[[Mapping[str, Any]], None] = lambda given: None,
    note: str = "",
    panel: str | None = None,
    confirm: str = "",
    nothing: str = "",
    part: str = "",
    success: str = "",
    **types: Any,
) -> None:
    """Register the command ``name``, which sends the call ``call`` of :class:`kith.Kith`.

    It has the parameters of the call that are required or in ``types``, which are of these types, or of TYPES. Its help
    is the first paragraph of the call's docstring, and ``note``. An option ``limit`` is the length of a list.

    Args:
        shows: format string of the answer's text, with the answer as 0 and arguments by name; a function that prints
            the answer; the columns of a list; or None: the answer is JSON, and may be written to a file.
        also: key in JSON and call of a list that the answer has besides. ``shows`` gets it as well.
        check: raises typer.BadParameter for options that exclude or need each other.
        confirm: question before the call.
        nothing: text for an empty list, unless options chose from it.
        part: attribute of the answer to show instead; of a list, the key of its items in JSON, beside the subject.
        success: attribute of the answer that says whether the exit status is 0.
    """
    about, defaults, _ = _descriptions()[call]
    types |= ({"yes": Yes} if confirm else {}) | ({"file": JsonFile} if shows is None else {})
    kinds = TYPES | types
    taken = {each: default for each, default in defaults.items() if each in types or default is Parameter.empty}
    taken |= {each: None for each in types if each not in taken}
    taken |= {each: Parameter.empty for each in taken if _is_argument(kinds[each], required=True)}

    def run(server: ServerOptions, yes: bool = False, file: Path | None = None, **given: Any) -> None:
        check(given)
        if confirm:
            require_confirmation(confirm.format(**given), yes)
        key, other = also
        with connect(server) as kith:
            answer = _send(kith, call, given)
            if isinstance(shows, tuple):
                answer = list(islice(answer, given.get("limit")))
            besides = list(_send(kith, other, given)) if other else []
        if shows is None:
            server.write(answer, file)
        elif other and callable(shows):
            server.answer(answer.model_dump(mode="json") | {key: besides}, partial(shows, answer, besides))
        elif isinstance(shows, tuple):
            document = {"subject": given["subject"], part: answer} if part else answer
            none = "Nothing matches." if any(map(given.get, types)) else nothing.format(**given)
            server.answer(document, list_table(answer, shows) if answer or not none else none)
        else:
            answer = getattr(answer, part) if part else answer
            ok = not success or getattr(answer, success)
            if isinstance(shows, str):
                server.answer(answer, shows.format(answer, removed=removed(answer), **given), ok)
            else:
                server.answer(answer, partial(shows, answer), ok)

    run.__doc__ = f"{about} {note}".strip()
    parameters = [
        Parameter(each, Parameter.KEYWORD_ONLY, default=default, annotation=kinds[each])
        for each, default in (taken | {"server": Parameter.empty}).items()
    ]
    parameters.sort(key=lambda each: not _is_argument(each.annotation))
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, rich_help_panel=panel)(run)


def _send(kith: Kith, call: str, given: Mapping[str, Any]) -> Any:
    """Send a call with those of the arguments that it has."""
    _, defaults, rest = _descriptions()[call]
    chosen = {each: value for each, value in given.items() if value is not None and each in (*defaults, rest)}
    several = chosen.pop(rest, ())
    places = [chosen.pop(each) for each in defaults if several and each in chosen]
    return getattr(kith, call)(*places, *several, **chosen)


def _is_argument(kind: Any, required: bool = False) -> bool:
    """Return whether an annotation is that of an argument, as opposed to an option, and not of one that may miss."""
    optional = type(None) in get_args(next(iter(get_args(kind)), None))
    return any(isinstance(part, ArgumentInfo) for part in get_args(kind)) and not (required and optional)


def removed(answer: Any) -> str:
    """Return what a receipt, or an answer with one, says that was removed: '1 subject, 2 templates'; or nothing."""
    counts: Mapping[str, int] = getattr(getattr(answer, "receipt", answer), "removed", {})
    return ", ".join(count_of(count, kind.removesuffix("s")) for kind, count in counts.items())


@cache
def _descriptions() -> Mapping[str, tuple[str, dict[str, Any], str]]:
    """Return the text of each call's help, its parameters with their defaults, of which only constants are read, and
    the name of the parameter that takes all others.

    The source is read without its import, which takes longer than the help of a command."""
    spec = find_spec("kith.calls")
    assert spec is not None and spec.origin is not None  # noqa: S101 - the package is installed
    found = {}
    for call in ast.walk(ast.parse(Path(spec.origin).read_bytes())):
        if isinstance(call, ast.FunctionDef) and (text := ast.get_docstring(call)):
            required = len(call.args.args) - len(call.args.defaults)
            values = [Parameter.empty] * required + [getattr(each, "value", None) for each in call.args.defaults]
            parameters = dict(zip([each.arg for each in call.args.args], values, strict=True))
            del parameters["self"]
            rest = call.args.vararg.arg if call.args.vararg else ""
            parameters |= {each.arg: None for each in call.args.kwonlyargs}
            text = text.partition("\n\n")[0].replace("Return", "Show").replace(" return ", " show ")
            named = re.compile(f"``({'|'.join(parameters)})``")
            found[call.name] = (named.sub(r"--\1", text).replace("``", ""), parameters, rest)
    return found
