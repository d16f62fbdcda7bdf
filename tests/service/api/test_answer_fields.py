"""Names and forms of fields, which are the same in all answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from service.app import create_app
from service.settings import load_settings

OTHER_NUMBERS = {
    "burst",
    "dimension",
    "embedding",
    "height",
    "image",
    "item",
    "line",
    "number",
    "other_face",
    "sequence",
    "status",
    "top_k",
    "width",
}
"""Positions, sizes, limits and codes."""
UNITS = ("_count", "_days", "_bytes", "_s")


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = load_settings(data_dir=tmp_path_factory.mktemp("kith"), log_level="ERROR")
    found: dict[str, Any] = create_app(settings).openapi()["components"]["schemas"]
    return found


def fields(schemas: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield schema, field and each of the field's types."""
    for name, schema in schemas.items():
        for field, value in schema.get("properties", {}).items():
            for kind in value.get("anyOf", [value]):
                yield name, field, kind


def test_numbers_of_things_end_in_count(schemas: dict[str, Any]) -> None:
    numbers = {(name, field) for name, field, kind in fields(schemas) if kind.get("type") == "integer"}
    assert len(numbers) > 60
    assert [each for each in numbers if not each[1].endswith(UNITS) and each[1] not in OTHER_NUMBERS] == []
    by_kind = {
        (name, field)
        for name, field, kind in fields(schemas)
        if kind.get("type") == "object" and kind.get("additionalProperties", {}) not in (True, False)
        if kind.get("additionalProperties", {}).get("type") == "integer"
    }
    assert len(by_kind) > 4
    assert {field for _, field in by_kind if not field.endswith("counts")} == {"removed"}, "of a receipt"
