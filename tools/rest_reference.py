"""Write docs/rest-reference.md: every route with its scope and summary, from the OpenAPI document.

A test compares the page with the code. After a change of routes: ``python -m tools.rest_reference``.
"""

from __future__ import annotations

from typing import Final

from bench.common import ROOT
from service.api.http.route_errors import HTTP, WITH_KEY, Errors, own_errors
from service.api.http.routing import Need, descriptions, needs_of
from service.app import ROUTES, create_app
from service.settings import load_settings

TARGET: Final = ROOT / "docs" / "rest-reference.md"
INTRODUCTION: Final = """# REST routes

All routes, with the scope that a key needs ([keys.md](keys.md)). *All galleries*: the key must not be bound to some.
A server shows parameters, bodies and answers at `/docs`, from its OpenAPI document at `/openapi.json`. Examples are
in [rest.md](rest.md), errors in [errors.md](errors.md). `python -m tools.rest_reference` writes this page.

| Routes | Errors |
|---|---|
| every route | {http} |
| every route that needs a key | {with_key} |
| a single route | as in its row |

| Route | Scope | Summary | Errors |
|---|---|---|---|"""


def reference() -> str:
    """Return the text of the page."""
    app = create_app(load_settings(_env_file=None))
    document, needs = app.openapi(), needs_of(ROUTES)
    own = {each.name: own_errors(each) for each in descriptions(ROUTES)}
    rows = [
        f"| `{method.upper()} {path}` | {_scope(needs[f'{method.upper()} {path}'])} | {_summary(operation)} "
        f"| {_codes(own[f'{method.upper()} {path}'])} |"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    introduction = INTRODUCTION.format(http=_codes(HTTP), with_key=_codes(WITH_KEY))
    return "\n".join([introduction, *rows, ""])


def _codes(errors: Errors) -> str:
    return ", ".join(sorted(f"`{error.code}`" for error in errors))


def _summary(operation: dict[str, str]) -> str:
    """Return the first sentence of a route's description."""
    first = " ".join(operation.get("description", "").split()).split(". ")[0]
    return first.rstrip(".").replace("|", "\\|")


def _scope(need: Need) -> str:
    if need.keyless:
        return "no key"
    if need.keyless_on_loopback:
        return "any key; none on loopback"
    words = "any key" if need.scope is None else f"`{need.scope}`"
    return f"{words}, all galleries" if need.all_galleries else words


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
