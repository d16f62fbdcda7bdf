"""docs/scale.md contains the tables that the script prints from the stored figures."""

from __future__ import annotations

import json

import pytest

from bench.scale import BEGIN, DOCUMENT, END, KINDS, RESULT, Measured, tables, whole


def test_the_document_has_the_tables() -> None:
    measured = Measured(**json.loads(RESULT.read_text()))
    between = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]
    assert between.strip() == tables(measured, whole()).strip()


def test_bytes_a_vector() -> None:
    """Independent calculation for 1000 vectors: their codes, and the graph's links by layer."""
    memory = {kind.name: kind.memory for kind in KINDS}
    assert memory["Milvus `FLAT`"] * 1000 == 1000 * 512 * 4
    assert memory["in process, `compact`"] - memory["in process, `exact`"] == 512 / 4 * 4 / 8
    layers = [32**-layer * (64 if layer == 0 else 32) * 4 for layer in range(8)]
    assert memory["Milvus `HNSW`"] - memory["Milvus `FLAT`"] == pytest.approx(sum(layers), abs=1)
