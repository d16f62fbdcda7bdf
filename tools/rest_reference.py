"""Write docs/rest-reference.md: every route with its scope and summary, from the OpenAPI document.

A test compares the page with the code. After a change of routes: ``python -m tools.rest_reference``.
"""

from __future__ import annotations

from typing import Final

from bench.common import ROOT
from service.api.http.access import Need, needs_of
from service.app import create_app
from service.settings import load_settings

TARGET: Final = ROOT / "docs" / "rest-reference.md"
INTRODUCTION: Final = """# REST routes

All routes, with the scope that a key needs ([keys.md](keys.md)). *All galleries*: the key must not be bound to some.
A server shows parameters, bodies and answers at `/docs`, from its OpenAPI document at `/openapi.json`. Examples are
in [rest.md](rest.md), the codes of problems in [errors.md](errors.md). `python -m tools.rest_reference` writes this
page.

| Route | Scope | Summary |
|---|---|---|"""


def reference() -> str:
    """Return the text of the page."""
    app = create_app(load_settings(_env_file=None))
    document, needs = app.openapi(), needs_of(app.routes)
    rows = [
        f"| `{method.upper()} {path}` | {_scope(needs[f'{method.upper()} {path}'])} | {_summary(operation)} |"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return "\n".join([INTRODUCTION, *rows, ""])


def _summary(operation: dict[str, str]) -> str:
    """Return the first sentence of a route's description."""
    first = " ".join(operation.get("description", "").split()).split(". ")[0]
    return first.rstrip(".").replace("|", "\\|")


def _scope(need: Need | None) -> str:
    if need is None:
        return "no key"
    words = "any key" if need.scope is None else f"`{need.scope}`"
    return f"{words}, all galleries" if need.all_galleries else words


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
