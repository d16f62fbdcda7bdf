"""Settings from the environment (``KITH_...``) or ``.env``, each with a default, validated at start."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

from dotenv.parser import parse_stream
from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from models.engines.selection import EnginePreference
from models.pack.loading import BUNDLED_PACK, find_pack
from models.runtime.network import Engine, Precision
from models.vision.face_search import Detail
from service.core.errors import SettingsError
from service.security.addresses import Hosts, is_loopback

MIN_KEY_CHARACTERS: Final = 32
"""Minimum length of KITH_API_KEY, which makes it unguessable if it is random."""
OTHERS: Final = {
    "command line": ("URL", "CLIENT_KEY"),
    "proxy": ("LISTEN", "NODE_1", "NODE_2", "PATH_PREFIX", "REQUESTS_PER_MINUTE", "TLS_FILE", "TLS_LISTEN"),
    "servers of databases": ("MINIO_PASSWORD", "POSTGRES_PASSWORD"),
    "tests": ("BROWSER", "DATA", "EXAMPLES", "IMAGE", "REFERENCE", "TEST_MILVUS"),
}
"""Variables after ``KITH_`` of other programs, which may share an environment or a ``.env`` with the service."""
_SERVICE_LINK: Final = re.compile(
    r"KITH_([A-Z0-9_]+_)?(SERVICE_HOST=.+|SERVICE_PORT(_[A-Z0-9_]+)?=\d+"
    r"|PORT=(tcp|udp|sctp)://.+|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=.+)"
)
"""Variables that Kubernetes adds for each Service of the namespace, if one is named kith or kith-..."""


def _split(text: str | None) -> list[str]:
    """Split comma-separated text, without empty parts."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _port(value: object) -> object:
    if "://" in str(value):
        raise ValueError(
            "Kubernetes set it to the address of a Service named kith: set enableServiceLinks: false in the pod's "
            "spec, or set KITH_PORT in its container's env"
        )
    return value


def _long_key(value: str) -> str:
    if len(value) < MIN_KEY_CHARACTERS:
        raise ValueError(
            f"it has fewer than {MIN_KEY_CHARACTERS} characters and could be guessed: set it to the output of "
            "openssl rand -hex 32"
        )
    return value


def _runtime(text: str) -> dict[str, Any]:
    """Return the ``engine``, ``precision`` and ``provider`` that a text names. Raises ValueError."""
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


def _origins(text: str) -> list[str]:
    """Raises ValueError."""
    for origin in _split(text):
        if re.fullmatch(r"https?://[a-z0-9.-]+(:\d{1,5})?", origin) is None:
            raise ValueError("give each origin as scheme and host in lower case, such as https://desk.example.org")
    return _split(text)


def _targets(text: str) -> tuple[Hosts, list[str]]:
    """Return public hosts, and origins allowed as they are, without the default port, which URLs omit. Raises
    ValueError."""
    origins = _origins(",".join(entry for entry in _split(text) if "://" in entry))
    hosts = Hosts.of_text(",".join(entry for entry in _split(text) if "://" not in entry))
    return hosts, [re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", origin) for origin in origins]


def _parsed(parse: Callable[[str], object]) -> BeforeValidator:
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


class Settings(BaseSettings):
    """Settings of the service. docs/settings.md has their descriptions."""

    model_config = SettingsConfigDict(
        env_prefix="KITH_",
        env_file=".env",
        env_file_encoding="utf-8-sig",  # with or without a byte order mark, which would hide the first variable
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        validate_default=False,
    )

    host: str = "127.0.0.1"
    """Address to listen on; `::`: all, of IPv4 too."""
    port: Annotated[int, Field(ge=0, le=65535), _parsed(_port)] = 8000
    """Port to listen on."""
    api_key: Annotated[SecretStr | None, _parsed(_long_key)] = None
    """Operator's key with all rights: at least 32 characters, as openssl rand -hex 32 prints (docs/keys.md)."""
    allow_anonymous: bool = False
    """Allow requests without an API key from other hosts than loopback, with any Host header."""
    cors_origins: Annotated[list[str] | None, NoDecode, _parsed(_origins)] = None
    """Comma-separated origins whose web pages may call the service with a key, as https://desk.example.org."""
    compat: Literal["compreface"] | None = None
    """Further API under /api/v1: compreface (docs/moving-here.md)."""
    data_dir: Path = Path("data")
    """Data directory, relative to the working directory."""
    stateless: bool = False
    """Only detect, embed and verify, and keep nothing (docs/deployment.md)."""
    database_url: str | None = None
    """postgresql://USER:PASSWORD@HOST/NAME or sqlite:///FILE; default: SQLite in the data directory."""
    master_key_file: Path | None = None
    """File of the master key: 32 bytes in base64 or hexadecimal, one key per line during a rotation; default:
    master.key in the data directory, created at the first start."""
    master_key: SecretStr | None = Field(None, min_length=1)
    """The master key itself, or several, instead of a file."""
    milvus_uri: str | None = None
    """Milvus server for the indexes, as http://HOST:19530, or http://HOST:19530/DATABASE if it is shared;
    default: FAISS in this process."""
    milvus_plaintext: bool = False
    """Confirm that Milvus, which stores vectors in plaintext, has encrypted volumes."""
    milvus_token: SecretStr | None = Field(None, min_length=1)
    """Token of Milvus, or USER:PASSWORD."""
    pack: Path = BUNDLED_PACK
    """Directory of the model pack, or name of a downloaded or bundled pack."""
    extra_packs: Annotated[list[str] | None, NoDecode, _parsed(_split)] = None
    """Comma-separated directories or names of packs whose recognizers are served, too; KITH_PACK provides the
    detector."""
    models_dir: Path | None = None
    """Directory of downloaded packs, and of a catalog.toml of mirrors (docs/models.md); default: models in the data
    directory."""
    runtime: Annotated[dict[str, Any] | None, NoDecode, _parsed(_runtime)] = None
    """Engine (onnxruntime, openvino), precision (fp32, bf16, fp16, int8) and onnxruntime execution provider of the
    networks, or some of them, as onnxruntime,fp32; default: the fastest that loses at most 0.1 points of accuracy,
    chosen and logged at the start."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device of networks, and of the vector search with faiss-gpu; auto: GPUs if onnxruntime's GPU build finds one.
    CUDA_VISIBLE_DEVICES chooses among several."""
    threads: int | None = Field(None, ge=1, le=256)
    """Threads per network; default: the available CPU cores."""
    detail: Detail = "low"
    """Default effort of face detection: low, medium or high (docs/models.md). Enrollments and verifications get at
    least medium."""
    max_image_bytes: int = Field(20_000_000, ge=1000)
    """Maximum photo size in bytes."""
    max_image_pixels: int = Field(50_000_000, ge=10_000)
    """Maximum photo size in pixels, width times height."""
    max_bodies_bytes: int = Field(2_000_000_000, ge=1_000_000)
    """Maximum size in bytes of all request bodies in memory, without archives and imports."""
    max_images: int = Field(16, ge=1, le=1000)
    """Maximum number of photos per request."""
    url_hosts: Annotated[Hosts | None, NoDecode, _parsed(Hosts.of_text)] = None
    """Comma-separated hosts whose photos may be fetched by https: names, *.example.org, or * for all."""
    webhook_hosts: Annotated[tuple[Hosts, list[str]] | None, NoDecode, _parsed(_targets)] = None
    """Comma-separated hosts that webhooks may go to: public ones by https as in KITH_URL_HOSTS, or origins such as
    http://10.0.0.5:8123, private or not."""
    mqtt_url: str | None = Field(
        None, pattern=r"^mqtts?://([^/?#@:]+@)?([a-zA-Z0-9.-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?(/[A-Za-z0-9_-]+)*$"
    )
    """MQTT broker that gets all events, as mqtts://USER@HOST:8883/PREFIX of topics (default: kith); mqtt is
    unencrypted; needs the extra mqtt."""
    mqtt_password_file: Path | None = None
    """File of the password for KITH_MQTT_URL."""
    mqtt_discovery: str | None = Field(None, pattern="^[A-Za-z0-9_/-]+$")
    """Prefix of Home Assistant's discovery topics, usually homeassistant."""
    max_upload_bytes: int = Field(20_000_000_000, ge=1000)
    """Maximum size in bytes of an archive or import; decompressed, five times."""
    deadline_s: float = Field(30.0, gt=0, le=3600)
    """Seconds after which a photo request gets 504; a header may ask for less (docs/rest.md)."""
    retention_jobs_days: float = Field(14, gt=0, le=36_500)
    """Days after which a finished job is deleted, and a job that no server can run is abandoned."""
    retention_albums_days: float = Field(7, gt=0, le=365)
    """Days after which an album is deleted."""
    index_memory: int | None = Field(None, ge=1_000_000)
    """Maximum bytes of vectors in memory; the least recently searched galleries are evicted."""
    audit_searches: Literal["soon", "before", "off"] = "soon"
    """When searches are written to the audit: soon, before or off (docs/keys.md)."""
    audit_days: float = Field(365, gt=0, le=36_500)
    """Days after which audit lines are deleted (docs/keys.md)."""
    log_format: Literal["text", "json"] = "text"
    """Log format: text, or one JSON document per line."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Log level."""

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
        return EnginePreference(**self.runtime or {}, threads=self.threads, device=self.device)

    @property
    def models_path(self) -> Path:
        return self.models_dir or self.data_dir / "models"

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
    def pack_paths(self) -> list[Path]:
        """Directories of the served packs, that of KITH_PACK first."""
        return [find_pack(Path(name), self.models_path) for name in (self.pack, *(self.extra_packs or ()))]

    @property
    def expected_face_detail(self) -> Detail:
        """Effort of face detection in photos that should show a face."""
        return "medium" if self.detail == "low" else self.detail

    @property
    def max_unpacked_bytes(self) -> int:
        """Maximum decompressed size of an archive or import."""
        return 5 * self.max_upload_bytes

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

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Raises ValueError: a stateless service has a place to store data, an optional package is missing, or
        encrypted Milvus volumes are not confirmed."""
        for name in ("database_url", "milvus_uri", "compat", "mqtt_url"):
            if self.stateless and getattr(self, name) is not None:
                raise ValueError(f"KITH_STATELESS keeps nothing: unset KITH_{name.upper()}, or KITH_STATELESS")
        for name, package, extra in (("milvus_uri", "pymilvus", "milvus"), ("mqtt_url", "aiomqtt", "mqtt")):
            if getattr(self, name) is not None and find_spec(package) is None:
                raise ValueError(f"KITH_{name.upper()} needs {package}: pip install '.[{extra}]' in a clone of Kith")
        if self.milvus_uri is not None and not self.milvus_plaintext:
            raise ValueError(
                "Milvus (KITH_MILVUS_URI) stores vectors in plaintext: encrypt its volumes (and those of its object "
                "store and log) by other means, then set KITH_MILVUS_PLAINTEXT=true"
            )
        return self


def load_settings(**overrides: object) -> Settings:
    """Read the settings. ``overrides`` take precedence over the environment.

    Raises:
        SettingsError: a value is invalid, settings exclude each other, or nothing reads a ``KITH_`` variable.
    """
    problems = _unread_variables()
    try:
        settings = Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        problems += [_message(each) for each in error.errors()]
    if problems:
        raise SettingsError("; ".join(problems))
    return settings


def _message(error: ErrorDetails) -> str:
    """Return the error message. An empty value is an error, not a default: an empty API key would open the service."""
    said = error["msg"].removeprefix("Value error, ")
    if str(error["input"]) == "":
        said = "it is empty: give it a value, or leave the variable out"
    return "".join(f"KITH_{str(name).upper()}: " for name in error["loc"][:1]) + said


def _unread_variables() -> list[str]:
    """Return a sentence for each ``KITH_`` variable that nothing reads: a limit with a mistyped name would not apply.

    Raises SettingsError: ``.env`` cannot be read.
    """
    problems = [_unknown_name(name) for name, value in os.environ.items() if not _is_read(name, value)]
    try:
        with Path(".env").open(encoding="utf-8-sig") as stream:
            lines = list(parse_stream(stream))
    except FileNotFoundError:
        return problems
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f".env in {Path.cwd()} cannot be read: {error}") from error
    for line in lines:
        if line.key is not None and line.value is not None:
            problems += [] if _is_read(line.key, line.value) else [_unknown_name(line.key, " in .env")]
        elif re.match(r"\s*(export\s+)?kith_", line.original.string, re.IGNORECASE):
            problems.append(f"line {line.original.line} of .env has no value: write NAME=VALUE")
    return problems


def _is_read(name: str, value: str) -> bool:
    """Return whether something reads a variable. Names of settings may be in lower case."""
    if name[:5].lower() != "kith_" or name[5:].lower() in Settings.model_fields:
        return True
    others = {f"KITH_{each}" for names in OTHERS.values() for each in names}
    return name in others or _SERVICE_LINK.fullmatch(f"{name}={value}") is not None


def _unknown_name(name: str, place: str = "") -> str:
    known = [*map(str.upper, Settings.model_fields), *OTHERS["command line"]]
    near = difflib.get_close_matches(name[5:].upper(), known, 1)
    advice = f"did you mean KITH_{near[0]}?" if near else "remove it; docs/settings.md lists all names"
    return f"{name}{place} is not a variable of Kith: {advice}"
