"""Settings from the environment (``KITH_...``) or ``.env``, each with a default, validated at start."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from models.engines import Wish
from models.gpus import GpuWish
from models.network import Engine, Precision
from models.pack import BUNDLED, find_pack
from service.errors import SettingsError
from service.security.addresses import Hosts, is_loopback

UNGUESSABLE: Final = 32
"""Minimum number of characters of KITH_API_KEY, as `openssl rand -hex 16` prints."""


class Settings(BaseSettings):
    """All settings; docs/settings.md repeats them, and a test keeps the two equal."""

    model_config = SettingsConfigDict(
        env_prefix="KITH_", env_file=".env", extra="ignore", frozen=True, hide_input_in_errors=True
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    api_key: SecretStr | None = Field(
        None,
        description=f"The operator's key, which may do everything, as bearer token or X-API-Key header; at least "
        f"{UNGUESSABLE} characters, as openssl rand -hex 32 prints; further ones: docs/keys.md.",
    )
    allow_anonymous: bool = Field(
        False, description="Listen beyond loopback, and answer to any host's name, although there is no API key."
    )
    rate_limit: float | None = Field(
        None,
        ge=1e-6,
        description="Requests a second that a key without a rate of its own may send; default: any number.",
    )
    rate_burst: int | None = Field(
        None, ge=1, description="How many of them may come at once; default: as many as in a second."
    )
    data_dir: Path = Field(Path("data"), description="Where the database lies, relative to the working directory.")
    database_url: str | None = Field(
        None, description="postgresql://USER:PASSWORD@HOST/NAME, or sqlite:///FILE; default: SQLite in data_dir."
    )
    master_key_file: Path | None = Field(
        None,
        description="File of the key that opens what is stored: 32 bytes in base64 or hexadecimal digits (openssl rand "
        "-base64 32); several, one a line, while one follows another; default: master.key in data_dir, made at the "
        "first start.",
    )
    master_key: SecretStr | None = Field(
        None, min_length=1, description="The key itself, or several, instead of a file."
    )
    master_key_command: str | None = Field(
        None,
        min_length=1,
        description="Program, with its arguments, that wraps and unwraps by a key that it does not give away "
        "(docs/decisions/0036); run without a shell.",
    )
    milvus_uri: str | None = Field(
        None, description="Milvus for the galleries' indexes, as http://HOST:19530; default: FAISS in this process."
    )
    milvus_plaintext: bool = Field(
        False,
        description="Milvus may be given vectors, which it stores in clear: its volumes are encrypted by other means.",
    )
    milvus_token: SecretStr | None = Field(None, min_length=1, description="Milvus' token, or USER:PASSWORD.")
    milvus_index: str = Field(
        "FLAT",
        pattern="^(FLAT|HNSW|IVF_FLAT|IVF_SQ8|DISKANN|AUTOINDEX)$",
        description="Index in Milvus; all but FLAT may miss somebody (docs/scale.md).",
    )
    milvus_prefix: str = Field(
        "kith",
        pattern="^[a-z][a-z0-9]{0,31}$",
        description="First word of the collections' names: each database needs its own.",
    )
    pack: Path = Field(BUNDLED, description="Directory of the model pack, or the name of a pulled or bundled one.")
    also: str | None = Field(
        None,
        description="Further packs whose recognisers are served, directories or names, with commas between; faces are "
        "found by the detector of KITH_PACK.",
    )
    models_dir: Path | None = Field(None, description="Where pulled packs lie; default: models in data_dir.")
    catalog: Path | None = Field(
        None, description="Another catalogue of packs, for mirrors of their files; default: the one Kith brings."
    )
    engine: Engine | None = Field(
        None, description="What runs the networks, onnxruntime or openvino; default: chosen, and said in the log."
    )
    precision: Precision | None = Field(
        None,
        description="Their numbers: fp32, bf16, fp16, int8; default: the fastest that loses at most 0.1 points.",
    )
    provider: str | None = Field(
        None, description="onnxruntime execution provider to insist on; default: the best that starts."
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto",
        description="Where networks run; auto: on GPUs, where onnxruntime's GPU build is installed and sees one.",
    )
    gpus: str | None = Field(
        None, pattern=r"^\d+(,\d+)*$", description="Which GPUs, as 0,1, counted from 0; default: all that are visible."
    )
    allow_cpu: bool = Field(False, description="Be ready although the GPU that is wanted runs nothing.")
    threads: int | None = Field(None, ge=1, le=256, description="Threads per network; default: the cores really there.")
    detection_score: float = Field(0.5, gt=0, lt=1, description="Faces below this detector score are not reported.")
    max_image_bytes: int = Field(20_000_000, ge=1000, description="Largest photo, in bytes.")
    max_image_pixels: int = Field(50_000_000, ge=10_000, description="Largest photo, width times height.")
    max_bodies_bytes: int = Field(
        2_000_000_000,
        ge=1_000_000,
        description="Bytes of all requests together, without archives and imports, beyond which calls get 503.",
    )
    max_images: int = Field(16, ge=1, le=1000, description="Most photos in one call.")
    url_hosts: str | None = Field(
        None,
        description="Hosts whose photos are fetched by URL, with commas between: names, *.example.org, or * for all; "
        "default: none.",
    )
    url_http: bool = Field(False, description="Fetch them over http, too, which anybody on the way may read and alter.")
    max_faces: int = Field(100, ge=1, le=10_000, description="Most faces reported per photo, largest score first.")
    max_embeddings: int = Field(16, ge=1, le=100_000, description="Most embeddings in one call.")
    embedding_rate: float = Field(
        2.0,
        ge=1e-6,
        description="Embeddings, and photos at a risk of the request's own, that each key may have compared with "
        "enrolled subjects a second, an hour's worth at once; an uncertain or refused one counts as 300, a photo as 30 "
        "(docs/keys.md).",
    )
    max_archive_bytes: int = Field(20_000_000_000, ge=1000, description="Largest archive of photos, in bytes.")
    max_archive_photos: int = Field(
        1_000_000, ge=1, description="Most entries in an archive, folders and links included."
    )
    max_unpacked_bytes: int = Field(100_000_000_000, ge=1000, description="Most bytes in an archive, unpacked.")
    max_import_bytes: int = Field(
        100_000_000_000,
        ge=1_000_000,
        description="Largest file to import, packed and unpacked; Parquet is kept in the data directory meanwhile.",
    )
    queue_size: int = Field(
        64,
        ge=1,
        le=100_000,
        description="Items waiting for a network, or requests for a gallery to be loaded, before calls get 503.",
    )
    deadline_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Seconds after which a request whose photos still wait gets 504; a header may ask for less "
        "(docs/rest.md).",
    )
    retention_answers_days: float = Field(
        14, gt=0, le=36_500, description="Days for which the answer to a request with an Idempotency-Key is kept."
    )
    retention_max_share: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Share of a gallery that retention erases at once; more waits for a confirmation "
        "(docs/galleries.md), unless it is fewer than 6 templates or subjects. 1: never wait.",
    )
    retention_jobs_days: float = Field(
        14,
        gt=0,
        le=36_500,
        description="Days after which a finished job is forgotten, and one that no server can run is given up.",
    )
    max_connections: int = Field(500, ge=1, le=100_000, description="Most connections open at once.")
    max_connections_per_address: int = Field(
        250, ge=1, le=100_000, description="Of one address (IPv6: of one /64); behind a proxy all are of one."
    )
    trusted_proxies: str | None = Field(
        None,
        description="Proxies whose X-Forwarded-For is trusted: addresses and networks, with commas between; default: "
        "none.",
    )
    max_head_bytes: int = Field(32_000, ge=1000, le=1_000_000, description="Longest address and headers of a request.")
    client_patience_s: float = Field(
        20.0,
        gt=0,
        le=3600,
        description="Seconds that a request's head may take to come, its body and the reading of its answer beyond "
        "what KITH_CLIENT_LEAST_RATE gives them.",
    )
    client_least_rate: int = Field(
        1000, ge=1, description="Bytes a second at which bodies must come and answers be read."
    )
    index_memory: int | None = Field(
        None,
        ge=1_000_000,
        description="Bytes of vectors to hold in memory; galleries searched least lately make room. Default: all.",
    )
    index_device: Literal["cpu", "gpu"] = Field("cpu", description="Where vectors are searched; gpu needs faiss-gpu.")
    audit_searches: Literal["soon", "before", "off"] = Field(
        "soon",
        description="When a search is written to the audit: within half a second, before it is answered, or not.",
    )
    metrics_galleries: int = Field(
        100, ge=0, le=10_000, description="Galleries that /metrics tells of by name; the others are counted together."
    )
    traces_url: str | None = Field(
        None,
        # What goes wrong with it is logged with the address.
        pattern="^https?://[^/?#@][^?#@]*$",
        description="Where traces are sent by OTLP over HTTP, as http://localhost:4318/v1/traces, without query or "
        "password; needs kith-face[tracing]; default: nowhere.",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Lines of the log, for people or one JSON document each."
    )
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="Level of the log.")

    @property
    def sql_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'kith.db'}"

    @property
    def database_file(self) -> Path | None:
        """None: the database is no file of SQLite."""
        begin = "sqlite:///"
        url = self.sql_url
        return Path(url.removeprefix(begin).partition("?")[0]) if url.startswith(begin) else None

    @property
    def default_key_path(self) -> Path:
        """Of the master key, where nothing else is said."""
        return self.data_dir / "master.key"

    @property
    def master_key_command_line(self) -> list[str]:
        """Raises SettingsError."""
        try:
            words = shlex.split(self.master_key_command or "")
        except ValueError as error:
            raise SettingsError(f"KITH_MASTER_KEY_COMMAND: {error}") from error
        if not words:
            raise SettingsError("KITH_MASTER_KEY_COMMAND: it names no program")
        return words

    @property
    def index_path(self) -> Path:
        return self.data_dir / "index"

    @property
    def wish(self) -> Wish:
        """Of what runs the networks."""
        indices = None if self.gpus is None else tuple(dict.fromkeys(int(index) for index in self.gpus.split(",")))
        gpu = GpuWish(self.device, indices, self.data_dir / "networks")
        return Wish(self.engine, self.precision, self.provider, self.threads, gpu)

    @property
    def models_path(self) -> Path:
        return self.models_dir or self.data_dir / "models"

    @property
    def url_host_list(self) -> Hosts:
        return Hosts.of_text(self.url_hosts or "")

    @property
    def pack_path(self) -> Path:
        return find_pack(self.pack, self.models_path)

    @property
    def pack_paths(self) -> list[Path]:
        """Of every pack served, that of KITH_PACK first."""
        also = [Path(name.strip()) for name in (self.also or "").split(",") if name.strip()]
        return [self.pack_path, *(find_pack(named, self.models_path) for named in also)]

    @property
    def trusted_proxy_list(self) -> list[str]:
        return [place.strip() for place in (self.trusted_proxies or "").split(",") if place.strip()]

    def max_request_bytes(self, photos: int) -> int:
        """Bytes of so many photos at their largest, in base64, with room for the rest."""
        return photos * (self.max_image_bytes * 4 // 3) + 1_000_000

    @field_validator("api_key")
    @classmethod
    def _is_unguessable(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < UNGUESSABLE:
            raise ValueError(
                f"it has fewer than {UNGUESSABLE} characters and could be guessed: set it to what "
                "openssl rand -hex 32 prints"
            )
        return value

    @field_validator("url_hosts")
    @classmethod
    def _are_hosts(cls, value: str | None) -> str | None:
        Hosts.of_text(value or "")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: str | None) -> str | None:
        for place in filter(None, map(str.strip, (value or "").split(","))):
            if ipaddress.ip_network(place).prefixlen == 0:
                raise ValueError("who believes everybody believes whoever makes up an address: name the proxies")
        return value

    def check_exposure(self, has_keys: Callable[[], bool]) -> None:
        """Refuse to listen beyond loopback with neither a key nor an explicit word. ``has_keys``: whether the database
        has any.

        Raises:
            SettingsError: as said.
        """
        exposed = self.api_key is None and not self.allow_anonymous and not is_loopback(self.host)
        if exposed and not has_keys():
            raise SettingsError(
                f"refusing to listen on {self.host} without an API key: make one (kith keys create --scope admin), "
                "set KITH_API_KEY, or KITH_ALLOW_ANONYMOUS=true if something else guards the service"
            )

    def check_extras(self) -> None:
        """Refuse settings whose optional packages are not installed, and a Milvus that nobody vouched for.

        Raises:
            SettingsError: as said.
        """
        if self.milvus_uri is not None and find_spec("pymilvus") is None:
            raise SettingsError("KITH_MILVUS_URI needs pymilvus: pip install 'kith-face[milvus]'")
        if self.traces_url is not None and not _is_installed("opentelemetry.exporter.otlp.proto.http"):
            raise SettingsError("KITH_TRACES_URL needs OpenTelemetry: pip install 'kith-face[tracing]'")
        if self.milvus_uri is not None and not self.milvus_plaintext:
            raise SettingsError(
                "KITH_MILVUS_URI names a Milvus, which stores vectors in clear: encrypt its volumes (and those of its "
                "object store and log) by other means, then set KITH_MILVUS_PLAINTEXT=true"
            )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # nor what it would lie in
        return False


def load_settings(**overrides: object) -> Settings:
    """Read the settings; explicit ``overrides`` win over the environment.

    Raises:
        SettingsError: a value is out of range; the error names the variable.
    """
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        problems = "; ".join(f"KITH_{str(e['loc'][0]).upper()}: {_told(e['input'], e['msg'])}" for e in error.errors())
        raise SettingsError(problems) from error


def _told(given: object, what: str) -> str:
    """An empty key is not taken for none, which would open a service whose compose file lacks a variable."""
    return "it is empty: give it a value, or leave the variable out" if str(given) == "" else what
