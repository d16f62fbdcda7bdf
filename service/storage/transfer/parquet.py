"""Export as Parquet: the header in the schema metadata, columns as in NDJSON. The only import of pyarrow.parquet."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from service.domain.gallery_items import GalleryFileHeader, GalleryItems
from service.storage.transfer.ndjson import COLUMNS

KEY: Final = b"kith"
TIME: Final = pa.timestamp("us", "UTC")
AS_JSON: Final = frozenset({"metadata", "quality"})


def schema_of(header: GalleryFileHeader) -> pa.Schema:
    columns = {
        "subject": pa.string(),
        "name": pa.string(),
        "metadata": pa.string(),
        "tags": pa.list_(pa.string()),
        "subject_created_at": TIME,
        "subject_updated_at": TIME,
        "template": pa.string(),
        "kind": pa.string(),
        "quality": pa.string(),
        "detection_score": pa.float64(),
        "created_at": TIME,
        "embedding": pa.list_(pa.float32(), header.dimension),
        "crop": pa.binary(),
        "landmarks": pa.string(),
    }
    return pa.schema(columns, {KEY: orjson.dumps(header.document())})


class Writer:
    """Streaming writer: returns the bytes of each block without keeping them."""

    def __init__(self, header: GalleryFileHeader) -> None:
        self._pieces = _Pieces()
        self._schema = schema_of(header)
        # Embeddings do not compress.
        plain = {"embedding.list.element": "none"}
        leaves = [name if name != "tags" else "tags.list.element" for name in self._schema.names if name != "embedding"]
        compression = plain | dict.fromkeys(leaves, "zstd")
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._pieces, "w"), self._schema, use_dictionary=["kind"], compression=compression
        )

    def write(self, items: GalleryItems) -> bytes:
        self._writer.write_batch(_batch(items, self._schema))
        return self._pieces.taken()

    def end(self) -> bytes:
        self._writer.close()
        return self._pieces.taken()


class _Pieces:
    """File object that collects written bytes until they are taken."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self.closed = False

    def write(self, piece: bytes) -> int:
        self._pieces.append(bytes(piece))
        self._size += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def taken(self) -> bytes:
        pieces, self._pieces = b"".join(self._pieces), []
        return pieces


def _batch(items: GalleryItems, schema: pa.Schema) -> pa.RecordBatch:
    def texts(column: list[Any]) -> pa.Array:
        return pa.array([None if v is None else orjson.dumps(v).decode() for v in column], pa.string())

    def array(name: str, column: list[Any]) -> pa.Array:
        kind = schema.field(name).type
        if kind == TIME:
            return pa.array(column, pa.int64()).cast(TIME)
        return texts(column) if name in AS_JSON else pa.array(column, kind)

    numbers = pa.array(np.ascontiguousarray(items.vectors, np.float32).ravel())
    absent = None if items.given.all() else pa.array(~items.given)
    arrays = [array(name, getattr(items, column)) for name, column in COLUMNS.items()]
    arrays += [
        pa.FixedSizeListArray.from_arrays(numbers, items.vectors.shape[1], mask=absent),
        pa.array([None if crop is None else crop[0] for crop in items.crops], pa.binary()),
        texts([None if crop is None else crop[1] for crop in items.crops]),
    ]
    return pa.record_batch(arrays, schema=schema)
