"""Milvus adapter: an index shared by all nodes, for galleries larger than one machine. The only pymilvus import.

A collection holds the rows of one recognizer and generation: one per subject, with the subject's key in the database,
so that changes are idempotent. The gallery is the partition key.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Final

import grpc
import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException
from pymilvus.milvus_client import IndexParams

from models.runtime.network import Float
from service.core.errors import IndexUnavailableError
from service.domain.gallery import Hit, Keys

# Errors are raised and logged once by the caller; the library would also print a traceback for each.
logging.getLogger("pymilvus").setLevel(logging.CRITICAL)

MAX_RESULTS: Final = 16_384
"""Limit of results per search in Milvus."""
KEYS_PER_EXPRESSION: Final = 8192
"""Keys in one filter expression, which Milvus must parse."""
RETRY_S: Final = 1.0
"""Time between connection attempts."""
PARTITIONS: Final = 64
NOT_FOUND: Final = 100
NOT_LOADED: Final = 101
INDEX: Final = "FLAT"
"""Index type of Milvus. It compares every vector of a gallery, so that answers are those of the index in process."""


class Milvus:
    """Connection, opened on first use. Safe to share between threads.

    ``prefix``: of the names of collections. ``timeout_s``: limit of one call.
    """

    def __init__(self, uri: str, token: str = "", prefix: str = "kith", timeout_s: float = 10.0) -> None:
        self._uri, self._token, self.prefix, self._timeout_s = uri, token, prefix, timeout_s
        self._client: MilvusClient | None = None
        self._refused: tuple[float, Exception] | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """Check that Milvus answers. Raises IndexUnavailableError."""
        self.call("list_collections")

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the client and return its result. Raises IndexUnavailableError."""
        try:
            return getattr(self._connected(), method)(*arguments, **options, timeout=self._timeout_s)
        except (MilvusException, grpc.RpcError) as error:
            raise _unavailable(error) from error

    def _connected(self) -> MilvusClient:
        # The client itself reconnects a connection that breaks later.
        with self._lock:
            if self._client is not None:
                return self._client
            # Otherwise queued requests would each wait for the timeout of a failing connection.
            if self._refused and time.monotonic() < self._refused[0] + RETRY_S:
                raise self._refused[1]
            try:
                self._client = MilvusClient(self._uri, token=self._token, timeout=self._timeout_s, dedicated=True)
            except (MilvusException, grpc.RpcError) as error:
                self._refused = (time.monotonic(), error)
                raise
            return self._client

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def collection(self, fingerprint: str, dimension: int, generation: int) -> Collection:
        """Return the collection of a recognizer and generation; create it if missing. Raises IndexUnavailableError.

        Its name has a random suffix, so that a recreated collection is not mistaken for one that has already applied
        changes. If several nodes create one at the same time, a sweep drops all but the first.
        """
        place = f"{fingerprint[:16]}_{dimension}_g{generation}_{INDEX.lower()}"
        if not any(found.place == place for found in self.collections()):
            name = f"{self.prefix}_subjects_{place}_{uuid.uuid4().hex[:12]}"
            self._create(name, dimension)
        for found in self.collections():
            if found.place == place:
                return found
        raise IndexUnavailableError("Milvus: a new collection was dropped")

    def collections(self) -> list[Collection]:
        """Return all collections of this installation, by name."""
        named = re.compile(rf"{re.escape(self.prefix)}_subjects_(([0-9a-f]+)_\d+_g(\d+)_[a-z0-9]+)_[0-9a-f]+")
        names = sorted(self.call("list_collections"))
        parted = [(name, parts) for name in names if (parts := named.fullmatch(name))]
        return [Collection(self, name, parts[1], parts[2], int(parts[3])) for name, parts in parted]

    def _create(self, name: str, dimension: int) -> None:
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", DataType.INT64, is_primary=True)
        schema.add_field("gallery", DataType.INT64, is_partition_key=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
        options: dict[str, Any] = {"num_partitions": PARTITIONS, "consistency_level": "Strong"}
        self.call("create_collection", name, schema=schema, index_params=_index(), **options)


class Collection:
    """Rows in Milvus, (key of a subject, gallery, vector), of the recognizer and generation that ``place`` names."""

    def __init__(self, milvus: Milvus, name: str, place: str, fingerprint: str, generation: int) -> None:
        self.place = place
        self.fingerprint = fingerprint
        self.generation = generation
        self._milvus = milvus
        self._name = name

    @property
    def engine(self) -> str:
        """Name of this index in the table of shared indexes."""
        return f"milvus/{self._name.rpartition('_')[2]}"

    def put(self, gallery_pk: int, keys: Keys, vectors: Float) -> None:
        """Insert or replace the rows of subjects, (n,) keys and (n, d) vectors, as many as one turn has."""
        rows = [
            {"key": key, "gallery": gallery_pk, "vector": vector}
            for key, vector in zip(keys.tolist(), vectors, strict=True)
        ]
        if rows:
            self._call("upsert", rows)

    def remove(self, keys: Iterable[int]) -> None:
        """Delete the rows with these keys."""
        for some in parts(sorted(keys)):
            self.remove_where(f"key in {some}")

    def remove_where(self, where: str) -> None:
        self._call("delete", filter=where)

    def drop(self) -> None:
        """Drop the collection; the next use creates and fills it again."""
        self._milvus.call("drop_collection", self._name)

    def keys(self, where: str) -> set[int]:
        return set(self._query(where, "key"))

    def galleries(self, where: str) -> set[int]:
        """Return gallery keys of matching rows, possibly not all."""
        return set(self._query(where, "gallery", limit=MAX_RESULTS))

    def count(self, where: str) -> int:
        return int(self._query(where, "count(*)")[0])

    def search(self, probes: Float, limit: int, where: str, settled: bool) -> list[list[Hit]]:
        """Return the ``limit`` most similar subjects of each (d,) probe, best first; at most MAX_RESULTS.

        ``settled``: all changes that must be visible are older than the bounded staleness.
        """
        answers = self._call(
            "search",
            data=list(np.ascontiguousarray(probes, np.float32)),
            filter=where,
            limit=min(MAX_RESULTS, limit),
            search_params={"metric_type": "IP"},
            consistency_level="Bounded" if settled else "Strong",
        )
        return [[Hit(hit["key"], hit["distance"]) for hit in hits] for hits in answers]

    def _query(self, where: str, field: str, **options: int) -> list[Any]:
        rows = self._call("query", filter=where, output_fields=[field], consistency_level="Strong", **options)
        return [row[field] for row in rows]

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return self._milvus.call(method, self._name, *arguments, **options)
        except IndexUnavailableError as error:
            if getattr(error.__cause__, "code", None) != NOT_LOADED:
                raise
        if not self._milvus.call("list_indexes", self._name):  # its creation was cut short
            self._milvus.call("create_index", self._name, _index())
        self._milvus.call("load_collection", self._name)
        return self._milvus.call(method, self._name, *arguments, **options)


def _index() -> IndexParams:
    params = MilvusClient.prepare_index_params()
    params.add_index("vector", index_type=INDEX, metric_type="IP")
    return params


def parts(keys: list[int]) -> Iterator[list[int]]:
    """Yield slices of keys for one filter expression each."""
    return (keys[start : start + KEYS_PER_EXPRESSION] for start in range(0, len(keys), KEYS_PER_EXPRESSION))


def _unavailable(error: Exception) -> IndexUnavailableError:
    said = error.message if isinstance(error, MilvusException) else str(getattr(error, "details", lambda: error)())
    return IndexUnavailableError(f"Milvus: {said}")
