"""Settings from the environment (``KITH_...``) or ``.env``, each with a default, validated at start."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args

from dotenv.parser import parse_stream
from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from models.engines.selection import EnginePreference, GpuPreference
from models.pack.loading import BUNDLED_PACK, find_pack
from models.runtime.network import Engine, Precision
from models.vision.face_search import Detail
from service.core.errors import SettingsError
from service.security.addresses import Hosts, is_loopback

MIN_KEY_CHARACTERS: Final = 32
"""Minimum length of KITH_API_KEY, which makes it unguessable if it is random."""
COMMAND_VARIABLES: Final = ("KITH_URL", "KITH_CLIENT_KEY")
"""Variables of the command line."""
TEST_VARIABLES: Final = (
    "KITH_BROWSER",
    "KITH_DATA",
    "KITH_EXAMPLES",
    "KITH_FAULTS",
    "KITH_IMAGE",
    "KITH_INSIGHTFACE_REST",
    "KITH_REFERENCE",
    "KITH_TEST_MILVUS",
)
"""Variables of tests and benchmarks, which start services."""
DEPLOYMENT_VARIABLES: Final = (
    "KITH_LISTEN",
    "KITH_MINIO_PASSWORD",
    "KITH_NODE_1",
    "KITH_NODE_2",
    "KITH_PATH_PREFIX",
    "KITH_POSTGRES_PASSWORD",
    "KITH_REQUESTS_PER_MINUTE",
    "KITH_TLS_FILE",
    "KITH_TLS_LISTEN",
)
"""Variables of the other programs in ``docker``, which may share an environment or a ``.env`` with Kith."""
_SERVICE_LINK: Final = re.compile(
    r"KITH_([A-Z0-9_]+_)?(SERVICE_HOST=.+|SERVICE_PORT(_[A-Z0-9_]+)?=\d+"
    r"|PORT=(tcp|udp|sctp)://.+|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=.+)"
)
"""Variables that Kubernetes adds for each Service of the namespace, if one is named kith or kith-..."""


class Settings(BaseSettings):
    """Settings of the service. A test compares them with docs/settings.md."""

    model_config = SettingsConfigDict(
        env_prefix="KITH_",
        env_file=".env",
        env_file_encoding="utf-8-sig",  # with or without a byte order mark, which would hide the first variable
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    host: str = Field("127.0.0.1", description="Address to listen on; `::`: all, of IPv4 too.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    api_key: SecretStr | None = Field(
        None,
        description=f"Operator's key with all rights: at least {MIN_KEY_CHARACTERS} characters, as "
        "openssl rand -hex 32 prints (docs/keys.md).",
    )
    allow_anonymous: bool = Field(
        False, description="Allow requests without an API key from other hosts than loopback, with any Host header."
    )
    cors_origins: str | None = Field(
        None,
        description="Comma-separated origins whose web pages may call the service with a key, as "
        "https://desk.example.org.",
    )
    compat: Literal["compreface"] | None = Field(
        None,
        description="Further API under /api/v1: compreface (docs/moving-here.md).",
    )
    data_dir: Path = Field(Path("data"), description="Data directory, relative to the working directory.")
    stateless: bool = Field(
        False,
        description="Only detect, embed and verify, and keep nothing (docs/deployment.md).",
    )
    database_url: str | None = Field(
        None,
        description="postgresql://USER:PASSWORD@HOST/NAME or sqlite:///FILE; default: SQLite in the data directory.",
    )
    master_key_file: Path | None = Field(
        None,
        description="File of the master key: 32 bytes in base64 or hexadecimal, one key per line during a rotation; "
        "default: master.key in the data directory, created at the first start.",
    )
    master_key: SecretStr | None = Field(
        None, min_length=1, description="The master key itself, or several, instead of a file."
    )
    milvus_uri: str | None = Field(
        None,
        description="Milvus server for the indexes, as http://HOST:19530, or http://HOST:19530/DATABASE if it has "
        "others' too; default: FAISS in this process.",
    )
    milvus_plaintext: bool = Field(
        False,
        description="Confirm that Milvus, which stores vectors in plaintext, has encrypted volumes.",
    )
    milvus_token: SecretStr | None = Field(None, min_length=1, description="Token of Milvus, or USER:PASSWORD.")
    pack: Path = Field(
        BUNDLED_PACK, description="Directory of the model pack, or name of a downloaded or bundled pack."
    )
    extra_packs: str | None = Field(
        None,
        description="Comma-separated directories or names of packs whose recognizers are served, too; KITH_PACK "
        "provides the detector.",
    )
    models_dir: Path | None = Field(
        None,
        description="Directory of downloaded packs, and of a catalog.toml of mirrors (docs/models.md); default: models "
        "in the data directory.",
    )
    runtime: str | None = Field(
        None,
        description="What runs networks, as onnxruntime,fp32: an engine (onnxruntime, openvino), a precision (fp32, "
        "bf16, fp16, int8) and an onnxruntime execution provider, or some of them; default: the fastest that loses at "
        "most 0.1 points of accuracy, chosen at start and logged.",
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto",
        description="Device of networks, and of the vector search with faiss-gpu; auto: GPUs if onnxruntime's GPU "
        "build finds one.",
    )
    gpus: str | None = Field(
        None, pattern=r"^\d+(,\d+)*$", description="Comma-separated GPU numbers, from 0; default: all visible GPUs."
    )
    threads: int | None = Field(
        None, ge=1, le=256, description="Threads per network; default: the available CPU cores."
    )
    detail: Detail = Field(
        "low",
        description="Default effort of face detection: low, medium or high (docs/models.md). Enrollments and "
        "verifications get at least medium.",
    )
    max_image_bytes: int = Field(20_000_000, ge=1000, description="Maximum photo size in bytes.")
    max_image_pixels: int = Field(
        50_000_000, ge=10_000, description="Maximum photo size in pixels, width times height."
    )
    max_bodies_bytes: int = Field(
        2_000_000_000,
        ge=1_000_000,
        description="Maximum size in bytes of all request bodies in memory, without archives and imports.",
    )
    max_images: int = Field(16, ge=1, le=1000, description="Maximum number of photos per request.")
    url_hosts: str | None = Field(
        None,
        description="Comma-separated hosts whose photos may be fetched by https: names, *.example.org, or * for all.",
    )
    webhook_hosts: str | None = Field(
        None,
        description="Comma-separated hosts that webhooks may go to: public ones by https as in KITH_URL_HOSTS, or "
        "origins such as http://10.0.0.5:8123, private or not.",
    )
    mqtt_url: str | None = Field(
        None,
        pattern=r"^mqtts?://([^/?#@:]+@)?([a-zA-Z0-9.-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?(/[A-Za-z0-9_-]+)*$",
        description="MQTT broker that gets all events, as mqtts://USER@HOST:8883/PREFIX of topics (default: kith); "
        "mqtt is unencrypted; needs the extra mqtt.",
    )
    mqtt_password_file: Path | None = Field(None, description="File of the password for KITH_MQTT_URL.")
    mqtt_discovery: str | None = Field(
        None,
        pattern="^[A-Za-z0-9_/-]+$",
        description="Prefix of Home Assistant's discovery topics, usually homeassistant.",
    )
    max_upload_bytes: int = Field(
        20_000_000_000, ge=1000, description="Maximum size in bytes of an archive or import; decompressed, five times."
    )
    deadline_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Seconds after which a photo request gets 504; a header may ask for less (docs/rest.md).",
    )
    retention_jobs_days: float = Field(
        14,
        gt=0,
        le=36_500,
        description="Days after which a finished job is deleted, and a job that no server can run is abandoned.",
    )
    retention_albums_days: float = Field(7, gt=0, le=365, description="Days after which an album is deleted.")
    index_memory: int | None = Field(
        None,
        ge=1_000_000,
        description="Maximum bytes of vectors in memory; the least recently searched galleries are evicted.",
    )
    audit_searches: Literal["soon", "before", "off"] = Field(
        "soon",
        description="When searches are written to the audit: soon, before or off (docs/keys.md).",
    )
    audit_days: float = Field(
        365, gt=0, le=36_500, description="Days after which audit lines are deleted (docs/keys.md)."
    )
    log_format: Literal["text", "json"] = Field("text", description="Log format: text, or one JSON document per line.")
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="Log level.")

    @property
    def sql_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'kith.db'}"

    @property
    def database_file(self) -> Path | None:
        """File of an SQLite database, else None."""
        prefix, url = "sqlite:///", self.sql_url
        return Path(url.removeprefix(prefix).partition("?")[0]) if url.startswith(prefix) else None

    @property
    def default_key_path(self) -> Path:
        """Master key file if no other is configured."""
        return self.data_dir / "master.key"

    @property
    def wish(self) -> EnginePreference:
        """Requested engine, precision and devices of networks."""
        indices = None if self.gpus is None else tuple(dict.fromkeys(int(index) for index in self.gpus.split(",")))
        gpu = GpuPreference(self.device, indices, self.data_dir / "networks")
        return EnginePreference(**_parse_runtime(self.runtime), threads=self.threads, gpu=gpu)

    @property
    def models_path(self) -> Path:
        return self.models_dir or self.data_dir / "models"

    @property
    def url_host_list(self) -> Hosts:
        return Hosts.of_text(self.url_hosts or "")

    @property
    def webhook_targets(self) -> tuple[Hosts, list[str]]:
        """Public hosts, and origins allowed as they are."""
        entries = _split(self.webhook_hosts)
        # URLs omit the default port.
        origins = [
            re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", entry) for entry in entries if "://" in entry
        ]
        return Hosts.of_text(",".join(entry for entry in entries if "://" not in entry)), origins

    @property
    def mqtt_password(self) -> str | None:
        """Raises SettingsError."""
        if self.mqtt_password_file is None:
            return None
        try:
            return self.mqtt_password_file.read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"KITH_MQTT_PASSWORD_FILE cannot be read: {error}") from error

    @property
    def pack_path(self) -> Path:
        return find_pack(self.pack, self.models_path)

    @property
    def pack_paths(self) -> list[Path]:
        """Directories of the served packs, that of KITH_PACK first."""
        return [self.pack_path, *(find_pack(Path(name), self.models_path) for name in _split(self.extra_packs))]

    @property
    def cors_origin_list(self) -> list[str]:
        return _split(self.cors_origins)

    @property
    def expected_face_detail(self) -> Detail:
        """Effort of face detection in photos that should show a face."""
        return "medium" if self.detail == "low" else self.detail

    @property
    def max_unpacked_bytes(self) -> int:
        """Maximum decompressed size of an archive or import."""
        return 5 * self.max_upload_bytes

    def max_request_bytes(self, photos: int) -> int:
        """Return the maximum body size for a number of photos in base64, with room for other fields."""
        return photos * (self.max_image_bytes * 4 // 3) + 1_000_000

    @field_validator("port", mode="before")
    @classmethod
    def _check_port(cls, value: object) -> object:
        if "://" in str(value):
            raise ValueError(
                "Kubernetes set it to the address of a Service named kith: set enableServiceLinks: false in the pod's "
                "spec, or set KITH_PORT in its container's env"
            )
        return value

    @field_validator("api_key")
    @classmethod
    def _check_key_length(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < MIN_KEY_CHARACTERS:
            raise ValueError(
                f"it has fewer than {MIN_KEY_CHARACTERS} characters and could be guessed: set it to the output of "
                "openssl rand -hex 32"
            )
        return value

    @field_validator("runtime")
    @classmethod
    def _check_runtime(cls, value: str | None) -> str | None:
        _parse_runtime(value)
        return value

    @field_validator("url_hosts")
    @classmethod
    def _check_hosts(cls, value: str | None) -> str | None:
        Hosts.of_text(value or "")
        return value

    @field_validator("cors_origins", "webhook_hosts")
    @classmethod
    def _check_origins(cls, value: str | None, info: ValidationInfo) -> str | None:
        origins = _split(value)
        if info.field_name == "webhook_hosts":
            Hosts.of_text(",".join(entry for entry in origins if "://" not in entry))
            origins = [entry for entry in origins if "://" in entry]
        for origin in origins:
            if re.fullmatch(r"https?://[a-z0-9.-]+(:\d{1,5})?", origin) is None:
                raise ValueError("give each origin as scheme and host in lower case, such as https://desk.example.org")
        return value

    def check_exposure(self, has_keys: Callable[[], bool]) -> None:
        """Refuse to listen beyond loopback without an API key, unless anonymous access is allowed explicitly.

        ``has_keys`` returns True if the database has a key. Raises SettingsError.
        """
        exposed = self.api_key is None and not self.allow_anonymous and not is_loopback(self.host)
        if exposed and not has_keys():
            raise SettingsError(
                f"refusing to listen on {self.host} without an API key: create one (kith keys create --scope admin), "
                "set KITH_API_KEY, or set KITH_ALLOW_ANONYMOUS=true if a proxy authenticates requests"
            )

    def check_extras(self) -> None:
        """Raises SettingsError: an optional package is missing, encrypted Milvus volumes are not confirmed, or a
        stateless service has a place to store data."""
        for name in ("database_url", "milvus_uri", "compat", "mqtt_url"):
            if self.stateless and getattr(self, name) is not None:
                raise SettingsError(f"KITH_STATELESS keeps nothing: unset KITH_{name.upper()}, or KITH_STATELESS")
        if self.milvus_uri is not None and find_spec("pymilvus") is None:
            raise SettingsError("KITH_MILVUS_URI needs pymilvus: pip install '.[milvus]' in a clone of Kith")
        if self.mqtt_url is not None and find_spec("aiomqtt") is None:
            raise SettingsError("KITH_MQTT_URL needs aiomqtt: pip install '.[mqtt]' in a clone of Kith")
        if self.milvus_uri is not None and not self.milvus_plaintext:
            raise SettingsError(
                "Milvus (KITH_MILVUS_URI) stores vectors in plaintext: encrypt its volumes (and those of its "
                "object store and log) by other means, then set KITH_MILVUS_PLAINTEXT=true"
            )


def _split(text: str | None) -> list[str]:
    """Split comma-separated text, without empty parts."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _parse_runtime(text: str | None) -> dict[str, Any]:
    """Return the ``engine``, ``precision`` and ``provider`` that KITH_RUNTIME names. Raises ValueError."""
    named: dict[str, Any] = {}
    for word in _split(text):
        if word in get_args(Engine):
            kind = "engine"
        elif word in get_args(Precision):
            kind = "precision"
        elif word.endswith("ExecutionProvider"):
            kind = "provider"
        else:
            raise ValueError(f"{word!r} is no engine, precision or execution provider: give such as onnxruntime,fp32")
        if kind in named:
            raise ValueError(f"{named[kind]} and {word} exclude each other: name one {kind}")
        named[kind] = word
    return named


def load_settings(**overrides: object) -> Settings:
    """Read the settings. ``overrides`` take precedence over the environment.

    Raises:
        SettingsError: a value is invalid, or nothing reads a ``KITH_`` variable. The error names the variable.
    """
    problems = _unread_variables()
    try:
        settings = Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        problems += [f"KITH_{str(e['loc'][0]).upper()}: {_message(e['input'], e['msg'])}" for e in error.errors()]
    if problems:
        raise SettingsError("; ".join(problems))
    return settings


def _unread_variables() -> list[str]:
    """Return a sentence for each ``KITH_`` variable that nothing reads: a limit with a mistyped name would not apply.

    Raises SettingsError: ``.env`` cannot be read.
    """
    problems = [_unknown_name(name, "") for name in _unknown(os.environ)]
    file = Path(".env")
    if file.is_file():
        try:
            with file.open(encoding="utf-8-sig") as stream:
                lines = list(parse_stream(stream))
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f".env in {Path.cwd()} cannot be read: {error}") from error
        problems += [
            f"line {line.original.line} of .env has no value: write NAME=VALUE"
            for line in lines
            if line.value is None and re.match(r"\s*(export\s+)?kith_", line.original.string, re.IGNORECASE)
        ]
        named = {line.key: line.value for line in lines if line.key is not None and line.value is not None}
        problems += [_unknown_name(name, " in .env") for name in _unknown(named)]
    return problems


def _unknown(variables: Mapping[str, str]) -> list[str]:
    """Return the names that start with ``KITH_`` and are not known. Names of settings may be in lower case."""
    settings = {f"KITH_{name.upper()}" for name in Settings.model_fields}
    others = {*COMMAND_VARIABLES, *DEPLOYMENT_VARIABLES, *TEST_VARIABLES}
    return [
        name
        for name, value in variables.items()
        if name.upper().startswith("KITH_")
        and name.upper() not in settings
        and name not in others
        and _SERVICE_LINK.fullmatch(f"{name}={value}") is None
    ]


def _unknown_name(name: str, place: str) -> str:
    known = [*(field.upper() for field in Settings.model_fields), *(each[5:] for each in COMMAND_VARIABLES)]
    near = difflib.get_close_matches(name[5:].upper(), known, n=1)
    advice = f"did you mean KITH_{near[0]}?" if near else "remove it; docs/settings.md lists all names"
    return f"{name}{place} is not a variable of Kith: {advice}"


def _message(value: object, message: str) -> str:
    """Return the error message. An empty value is an error, not a default: an empty API key would open the service."""
    if str(value) == "":
        return "it is empty: give it a value, or leave the variable out"
    return message.removeprefix("Value error, ")
