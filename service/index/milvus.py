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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException

from models.runtime.network import Float
from service.core.errors import IndexUnavailableError
from service.domain.gallery import Hit, Keys

# Errors are raised and logged once by the caller; the library would also print a traceback for each.
logging.getLogger("pymilvus").setLevel(logging.CRITICAL)

MAX_RESULTS: Final = 16_384
"""Limit of results per search in Milvus."""
KEYS_PER_EXPRESSION: Final = 8192
"""Keys in one filter expression, which Milvus must parse."""
ROWS_PER_REQUEST: Final = 1000
RETRY_S: Final = 1.0
"""Time between connection attempts."""
PARTITIONS: Final = 64
NOT_FOUND: Final = 100
NOT_LOADED: Final = 101
INDEX: Final = "FLAT"
"""Index type of Milvus. It compares every vector of a gallery, so that answers are those of the index in process."""


@dataclass(frozen=True)
class MilvusOptions:
    """Address of Milvus, and prefix of collection names. ``timeout_s``: limit of one call."""

    uri: str
    token: str = ""
    prefix: str = "kith"
    timeout_s: float = 10.0


@dataclass(frozen=True)
class Place:
    """Content of a collection."""

    fingerprint: str
    dimension: int
    generation: int


class Milvus:
    """Connection, opened on first use. Safe to share between threads."""

    def __init__(self, options: MilvusOptions) -> None:
        self.options = options
        self.timeout_s = options.timeout_s
        self._client: MilvusClient | None = None
        self._refused: tuple[float, Exception] | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """Check that Milvus answers. Raises IndexUnavailableError."""
        self.call(lambda client: client.list_collections(timeout=self.timeout_s))

    def call(self, function: Callable[[MilvusClient], Any]) -> Any:
        """Call a function with the client and return its result. Raises IndexUnavailableError."""
        try:
            return function(self._connected())
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
                self._client = MilvusClient(
                    uri=self.options.uri, token=self.options.token, timeout=self.timeout_s, dedicated=True
                )
            except (MilvusException, grpc.RpcError) as error:
                self._refused = (time.monotonic(), error)
                raise
            return self._client

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def collection(self, place: Place) -> Collection:
        """Return the collection behind a fixed alias; create it if missing.

        If several nodes create it at the same time, one succeeds. Its name has a random suffix, so that a recreated
        collection is not mistaken for one that has already applied changes.
        """
        alias = (
            f"{self.options.prefix}_subjects_{place.fingerprint[:16]}_{place.dimension}_g{place.generation}"
            f"_{INDEX.lower()}"
        )
        found = self._behind(alias)
        if found is None:
            made = f"{alias}_{uuid.uuid4().hex[:12]}"
            self.call(lambda client: _create(client, made, place.dimension, self.options))
            try:
                self.call(lambda client: client.create_alias(made, alias, timeout=self.timeout_s))
            except IndexUnavailableError:
                found = self._behind(alias)
                self.call(lambda client: client.drop_collection(made, timeout=self.timeout_s))
                if found is None:
                    raise
        return Collection(self, found or made)

    def _behind(self, alias: str) -> str | None:
        try:
            return str(
                self.call(lambda client: client.describe_alias(alias, timeout=self.timeout_s))["collection_name"]
            )
        except IndexUnavailableError as error:
            if "not exist" in error.detail or "not found" in error.detail:
                return None
            raise

    def collections(self) -> Iterator[tuple[Place, Collection]]:
        """Yield all collections of this installation."""
        named = re.compile(rf"{re.escape(self.options.prefix)}_subjects_([0-9a-f]+)_(\d+)_g(\d+)_[a-z0-9]+_[0-9a-f]+")
        for name in self.call(lambda client: client.list_collections(timeout=self.timeout_s)):
            if parts := named.fullmatch(name):
                yield Place(parts[1], int(parts[2]), int(parts[3])), Collection(self, name)


def _create(client: MilvusClient, name: str, dimension: int, options: MilvusOptions) -> None:
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("key", DataType.INT64, is_primary=True)
    schema.add_field("gallery", DataType.INT64, is_partition_key=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
    index = client.prepare_index_params()
    index.add_index("vector", index_type=INDEX, metric_type="IP")
    client.create_collection(
        name,
        schema=schema,
        index_params=index,
        num_partitions=PARTITIONS,
        consistency_level="Strong",
        timeout=options.timeout_s,
    )


class Collection:
    """Rows in Milvus: (key of a subject, gallery, vector)."""

    def __init__(self, milvus: Milvus, name: str) -> None:
        self._milvus = milvus
        self._name = name
        self._timeout_s = milvus.timeout_s

    @property
    def engine(self) -> str:
        """Name of this index in the table of shared indexes."""
        return f"milvus/{self._name.rpartition('_')[2]}"

    def put(self, gallery_pk: int, keys: Keys, vectors: Float) -> None:
        """Insert or replace the rows of subjects, (n,) keys and (n, d) vectors."""
        rows = [
            {"key": key, "gallery": gallery_pk, "vector": vector}
            for key, vector in zip(keys.tolist(), vectors, strict=True)
        ]
        for start in range(0, len(rows), ROWS_PER_REQUEST):
            some = rows[start : start + ROWS_PER_REQUEST]
            self._call(lambda client: client.upsert(self._name, some, timeout=self._timeout_s))  # noqa: B023

    def remove(self, keys: Iterable[int]) -> None:
        """Delete the rows with these keys."""
        for some in parts(sorted(keys)):
            self.remove_where(f"key in {some}")

    def remove_where(self, where: str) -> None:
        self._call(lambda client: client.delete(self._name, filter=where, timeout=self._timeout_s))

    def drop(self) -> None:
        """Drop the collection; the next use creates and fills it again."""

        def remove(client: MilvusClient) -> None:
            for alias in client.list_aliases(self._name, timeout=self._timeout_s)["aliases"]:
                client.drop_alias(alias, timeout=self._timeout_s)
            client.drop_collection(self._name, timeout=self._timeout_s)

        self._call(remove)

    def keys(self, where: str) -> set[int]:
        return {row["key"] for row in self._query(where, ["key"])}

    def galleries(self, where: str) -> set[int]:
        """Return gallery keys of matching rows, possibly not all."""
        return {row["gallery"] for row in self._query(where, ["gallery"], limit=MAX_RESULTS)}

    def count(self, where: str) -> int:
        return int(self._query(where, ["count(*)"])[0]["count(*)"])

    def search(self, probes: Float, limit: int, where: str, settled: bool) -> list[list[Hit]]:
        """Return the ``limit`` most similar subjects of each (d,) probe, best first; at most MAX_RESULTS.

        ``settled``: all changes that must be visible are older than the bounded staleness.
        """
        answers = self._call(
            lambda client: client.search(
                self._name,
                data=list(np.ascontiguousarray(probes, np.float32)),
                filter=where,
                limit=min(MAX_RESULTS, limit),
                search_params={"metric_type": "IP"},
                consistency_level="Bounded" if settled else "Strong",
                timeout=self._timeout_s,
            )
        )
        return [[Hit(hit["key"], hit["distance"]) for hit in hits] for hits in answers]

    def _query(self, where: str, fields: list[str], **options: int) -> Sequence[Any]:
        rows: Sequence[Any] = self._call(
            lambda client: client.query(
                self._name,
                filter=where,
                output_fields=fields,
                consistency_level="Strong",
                timeout=self._timeout_s,
                **options,
            )
        )
        return rows

    def _call(self, function: Callable[[MilvusClient], Any]) -> Any:
        def loaded(client: MilvusClient) -> Any:
            try:
                return function(client)
            except MilvusException as error:
                if error.code != NOT_LOADED:
                    raise
                client.load_collection(self._name, timeout=self._timeout_s)
                return function(client)

        return self._milvus.call(loaded)


def parts(keys: list[int]) -> Iterator[list[int]]:
    """Yield slices of keys for one filter expression each."""
    return (keys[start : start + KEYS_PER_EXPRESSION] for start in range(0, len(keys), KEYS_PER_EXPRESSION))


def _unavailable(error: Exception) -> IndexUnavailableError:
    said = error.message if isinstance(error, MilvusException) else str(getattr(error, "details", lambda: error)())
    return IndexUnavailableError(f"Milvus: {said}")
