"""Galleries as Parquet: the header in the schema metadata, columns as in NDJSON. The only import of pyarrow.parquet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO, Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from service.core.errors import EmbeddingError, ImportFileError, ItemError, KithError
from service.domain.gallery_items import MAX_METADATA_ENTRIES, GalleryFileHeader, GalleryItems, max_items, rows_in_block
from service.security.sealing import VECTOR_TYPE
from service.storage.transfer.ndjson import FIELDS, MAX_BLOCK_BYTES, MAX_LINE_BYTES
from service.storage.transfer.parquet_footer import BYTE_ARRAY, Column, RowGroup, row_groups

READ_BYTES: Final = 1 << 20
MAX_GROUP_BYTES: Final = 500_000_000
"""Uncompressed size of a row group without embeddings. One page may hold all of it and is decompressed at once."""
KEY: Final = b"kith"
TIME: Final = pa.timestamp("us", "UTC")


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

    def times(column: list[int | None]) -> pa.Array:
        return pa.array(column, pa.int64()).cast(TIME)

    numbers = pa.array(np.ascontiguousarray(items.vectors, np.float32).ravel())
    absent = None if items.given.all() else pa.array(~items.given)
    return pa.record_batch(
        [
            pa.array(items.subjects, pa.string()),
            pa.array(items.names, pa.string()),
            texts(items.metadata),
            pa.array(items.tags, pa.list_(pa.string())),
            times(items.subject_created_us),
            times(items.subject_updated_us),
            pa.array(items.templates, pa.string()),
            pa.array(items.kinds, pa.string()),
            texts(items.qualities),
            pa.array(items.detection_scores, pa.float64()),
            times(items.created_us),
            pa.FixedSizeListArray.from_arrays(numbers, items.vectors.shape[1], mask=absent),
            pa.array([None if crop is None else crop[0] for crop in items.crops], pa.binary()),
            texts([None if crop is None else crop[1] for crop in items.crops]),
        ],
        schema=schema,
    )


class Reader:
    """Open Parquet file from any tool. Columns are matched by name; only ``subject`` is required.

    Raises:
      ImportFileError: not a Parquet file, or its recognizer is unknown.
    """

    def __init__(self, file: IO[bytes], default: GalleryFileHeader | None = None) -> None:
        try:
            groups = row_groups(file)
            most = max_items(file.seek(0, os.SEEK_END))
            if sum(group.rows for group in groups) > most:
                raise ValueError(f"it has more than {most} rows for its size")
            # Without these options pyarrow prefetches and keeps the whole file. Dictionary columns stay encoded, so
            # that a text repeated in millions of rows takes no memory before its size is checked.
            self._file = pq.ParquetFile(
                file, pre_buffer=False, buffer_size=READ_BYTES, read_dictionary=_dictionary_columns(groups)
            )
            self._schema = self._file.schema_arrow
        except MemoryError:
            raise
        except Exception as error:  # pyarrow raises unrelated exception types on damaged files
            raise ImportFileError(f"the file is not a valid Parquet file: {error}") from error
        said = (self._schema.metadata or {}).get(KEY)
        if said is None and default is None:
            raise ImportFileError("the file's schema has no header; name its recognizer with ?recognizer=")
        try:
            document = None if said is None else orjson.loads(said)
        except orjson.JSONDecodeError as error:
            raise ImportFileError("the header in the file's schema is not JSON") from error
        if document is None:
            assert default is not None  # noqa: S101 - as checked above
            self.header = default
        elif isinstance(document, dict):
            self.header = GalleryFileHeader.of(document)
        else:
            raise ImportFileError("the header in the file's schema is not a JSON object")
        self._check_columns()
        self._rows = _rows_per_batch(groups, self.header.dimension)

    def _check_columns(self) -> None:
        columns = {field.name: field.type for field in self._schema}
        if twice := [name for name in FIELDS if self._schema.names.count(name) > 1]:
            raise ImportFileError(f"the file has two columns {twice[0]!r}")
        for name in ("subject", *(n for n in ("name", "template", "kind") if n in columns)):
            if name not in columns or not (_is_text(columns[name]) or pa.types.is_null(columns[name])):
                raise ImportFileError(f"column {name!r} must contain text")

    def __iter__(self) -> Iterator[GalleryItems]:
        """Yield blocks of items. Raises ImportFileError."""
        number = 1
        try:
            for batch in self._file.iter_batches(self._rows, columns=list(FIELDS)):
                for part in _parts(batch, number):
                    yield _items(part, number, self.header.dimension)
                    number += len(part)
        except (KithError, MemoryError):
            raise
        except Exception as error:
            raise ImportFileError(f"the Parquet file cannot be read from item {number} on: {error}") from error


def _dictionary_columns(groups: list[RowGroup]) -> list[str]:
    """Return the paths of text and binary columns that use a dictionary."""
    read = (column for group in groups for column in _read_columns(group))
    return sorted({each.path for each in read if each.physical_type == BYTE_ARRAY and each.has_dictionary})


def _read_columns(group: RowGroup) -> list[Column]:
    """Return the columns of a row group that the import reads."""
    return [column for column in group.columns if column.path.partition(".")[0] in FIELDS]


def _rows_per_batch(groups: list[RowGroup], dimension: int) -> int:
    """Return the rows per batch for an average of MAX_BLOCK_BYTES. Raises ImportFileError if a row group is too
    large."""
    most = rows_in_block(dimension)
    for number, group in enumerate(groups, start=1):
        rows, size = max(1, group.rows), 0
        for column in _read_columns(group):
            name = column.path.partition(".")[0]
            if column.values > 2 * rows * (dimension if name == "embedding" else MAX_METADATA_ENTRIES):
                raise ImportFileError(f"lists in column {name!r} are too long: {column.values} values in {rows} rows")
            size += 0 if name == "embedding" else column.size
        if size > min(MAX_GROUP_BYTES, rows * MAX_LINE_BYTES):
            raise ImportFileError(
                f"row group {number} has {size} bytes besides embeddings in {rows} rows. "
                f"The limits are {MAX_LINE_BYTES} bytes per row and {MAX_GROUP_BYTES} per group; write smaller groups"
            )
        most = min(most, max(1, MAX_BLOCK_BYTES * rows // max(1, size)))
    return most


def _parts(batch: pa.RecordBatch, number: int) -> Iterator[pa.RecordBatch]:
    """Split a batch until each part has at most MAX_BLOCK_BYTES with dictionary values expanded."""
    size = sum(map(_size, batch.columns))
    if size <= MAX_BLOCK_BYTES and (len(batch) > 1 or size <= MAX_LINE_BYTES):
        yield batch
    elif len(batch) == 1:
        raise ImportFileError(f"item {number} has {size} bytes, more than {MAX_LINE_BYTES}")
    else:
        half = len(batch) // 2
        yield from _parts(batch[:half], number)
        yield from _parts(batch[half:], number + half)


def _size(column: pa.Array) -> int:
    if pa.types.is_dictionary(column.type):
        lengths = pc.binary_length(column.dictionary)
        return int(pc.sum(pc.take(lengths, column.indices)).as_py() or 0)
    if pa.types.is_struct(column.type):
        return sum(map(_size, column.flatten()))
    if pa.types.is_map(column.type):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return _size(column.keys[first:last]) + _size(column.items[first:last])
    if pa.types.is_nested(column.type):
        return _size(column.flatten())
    return int(column.nbytes)


def _is_text(kind: pa.DataType) -> bool:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(value) or pa.types.is_large_string(value))


def _items(batch: pa.RecordBatch, first: int, dimension: int) -> GalleryItems:
    malformed: dict[int, KithError] = {}

    def column(name: str) -> list[Any]:
        said = name in batch.schema.names and batch.column(name).null_count < len(batch)
        return list(batch.column(name).to_pylist()) if said else [None] * len(batch)

    def objects(name: str) -> list[Any]:
        values = column(name)
        for row, value in enumerate(values):
            if isinstance(value, str | bytes):
                try:
                    values[row] = orjson.loads(value)
                except ValueError:
                    malformed.setdefault(row, ItemError(f"{name}: is not JSON"))
            elif value is not None and pa.types.is_map(batch.column(name).type):
                values[row] = dict(value)
        return values

    def times(name: str) -> list[int | None]:
        if name not in batch.schema.names or batch.column(name).null_count == len(batch):
            return [None] * len(batch)
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind = column.type
        # Truncate nanoseconds to microseconds; reject times outside the range of microseconds.
        finer = pa.types.is_timestamp(kind) and kind.unit == "ns"
        try:
            return list(column.cast(TIME, safe=not finer).cast(pa.int64()).to_pylist())
        except pa.ArrowException:
            return [_microseconds(row, name, value) for row, value in enumerate(column)]

    def _microseconds(row: int, name: str, value: pa.Scalar) -> int | None:
        try:
            return value.cast(TIME).cast(pa.int64()).as_py()  # type: ignore[no-any-return]
        except pa.ArrowException:
            malformed.setdefault(row, ItemError(f"{name}: is not a time"))
            return None

    vectors, given = _vectors(batch, dimension, malformed)
    crops = zip(column("crop"), objects("landmarks"), strict=True)
    return GalleryItems(
        range(first, first + len(batch)),
        column("subject"),
        column("name"),
        objects("metadata"),
        column("tags"),
        times("subject_created_at"),
        times("subject_updated_at"),
        column("template"),
        column("kind"),
        objects("quality"),
        column("detection_score"),
        times("created_at"),
        [None if image is None else (image, landmarks) for image, landmarks in crops],
        vectors,
        given,
        malformed,
    )


def _vectors(batch: pa.RecordBatch, dimension: int, malformed: dict[int, KithError]) -> tuple[Any, Any]:
    """Return (n, d) vectors and (n,) flags of the column ``embedding``, which may be any kind of list."""
    n = len(batch)
    if "embedding" not in batch.schema.names or pa.types.is_null(batch.column("embedding").type):
        return np.zeros((n, dimension), np.float32), np.zeros(n, np.bool_)
    embeddings = batch.column("embedding")
    kind = embeddings.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise ImportFileError(f"column 'embedding' must be lists of numbers, not {kind}")
    if pa.types.is_fixed_size_list(kind) and kind.list_size == dimension and not embeddings.null_count:
        flat = embeddings.flatten().cast(pa.float32()).to_numpy(zero_copy_only=False)
        return np.asarray(flat, VECTOR_TYPE).reshape(n, dimension), np.ones(n, np.bool_)
    vectors, given = np.zeros((n, dimension), np.float32), np.zeros(n, np.bool_)
    for row, embedding in enumerate(embeddings):
        if not embedding.is_valid:
            continue
        if len(embedding) != dimension:
            error = EmbeddingError(f"embedding has {len(embedding)} numbers, this recognizer's have {dimension}")
            malformed.setdefault(row, error)
            continue
        vectors[row] = embedding.values.cast(pa.float32()).to_numpy(zero_copy_only=False)
        given[row] = True
    return vectors, given
