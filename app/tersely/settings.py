"""The settings, read once from the environment, ``.env`` or ``tersely.toml``; handed on by the composition root."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from typing_extensions import override

from tersely.dialects.account_routes import parse_passthrough
from tersely.domain.errors import InvalidRequest, TerselyError
from tersely.domain.limits import MAX_DAYS, MAX_LIMIT
from tersely.domain.tools.catalog import parse_offer

OnOff = Literal["on", "off"]
ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?")
HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


# Settings that have members.
NESTED = frozenset({"upstreams", "limits"})
# MiB.
MOST_LIVE_SESSIONS = 1_000_000
# Bytes, where no sessions are live.
SESSION_CACHE = 32 * 1024 * 1024
PREFIX = "TERSELY_"
# Variables that the service sets for its own workers.
INTERNAL = "TERSELY_RUNNING_"
# Variables that the commands read.
OF_COMMANDS = frozenset({"TERSELY_URL", "TERSELY_KEY", "TERSELY_SESSION"})
# Variables that docker-compose.yml reads from the same file.
OF_COMPOSE = frozenset({"TERSELY_PORT", "TERSELY_WORKERS"})
ENVIRONMENT_FILE = ".env"
TOML_FILE = "tersely.toml"


class InvalidSettings(TerselyError):
    """A setting, or a file of settings, cannot be read."""


class UpstreamSettings(BaseModel):
    """A further model host: its dialect, base URL and key, and patterns (``*``, ``?``) of its models.

    ``openai`` means chat completions and responses; ``azure`` the same by Azure OpenAI's paths.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dialect: Literal["openai", "anthropic", "gemini", "azure"]
    base_url: str
    api_key: SecretStr | None = None
    models: tuple[str, ...] = ()

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        return check_address(value)


class LimitSettings(BaseModel):
    """Limits of every tenant without limits of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: int | None = Field(default=None, ge=0, le=MAX_LIMIT)
    concurrent: int | None = Field(default=None, ge=0, le=MAX_LIMIT)
    tokens_per_day: int | None = Field(default=None, ge=0, le=MAX_LIMIT)
    money_per_month: float | None = Field(default=None, ge=0, le=MAX_LIMIT)
    stored_bytes: int | None = Field(default=None, ge=0, le=MAX_LIMIT)


def check_address(value: str) -> str:
    """Return an http(s) address without a slash at its end. Raises `ValueError`."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{value!r} is not an http(s) address")
    return value.rstrip("/")


class Settings(BaseSettings):
    """Every setting by its environment variable. Sizes are bytes, times seconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_file=ENVIRONMENT_FILE, toml_file=TOML_FILE, extra="ignore", frozen=True
    )

    database_url: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("DATABASE_URL", "TERSELY_DATABASE_URL")
    )
    database_pool: int = Field(default=10, ge=1, le=500)
    database_timeout: float = Field(default=5.0, gt=0, le=60)
    database_pooler: Literal["off", "on", "prepared"] = "off"
    data_dir: Path | None = None

    openai_base_url: str = "https://api.openai.com/v1"
    openai_api_key: SecretStr | None = None
    anthropic_base_url: str = "https://api.anthropic.com"
    anthropic_api_key: SecretStr | None = None
    gemini_base_url: str = "https://generativelanguage.googleapis.com"
    gemini_api_key: SecretStr | None = None
    gemini_gca_base_url: str = "https://cloudcode-pa.googleapis.com"
    upstreams: Annotated[dict[str, UpstreamSettings], NoDecode] = Field(default_factory=dict)
    connect_timeout: float = Field(default=10.0, gt=0)
    first_byte_timeout: float = Field(default=600.0, gt=0)
    idle_timeout: float = Field(default=300.0, gt=0)
    heartbeat: float = Field(default=15.0, gt=0)
    cache_ttl: float = Field(default=300.0, ge=0)

    strategy: str = "slim"
    epoch: str = "auto"
    references: int | None = Field(default=None, ge=0, le=100_000)
    tools: str | None = None
    instructions: OnOff = "on"
    repeats: OnOff = "off"
    shadow: str | None = None
    chat_commands: OnOff = "off"
    derive_terse: OnOff = "on"
    fail_open: OnOff = "on"
    spool_size: int = Field(default=1024**3, ge=0, le=2**50)

    live_sessions: str = "256"

    cleanup_days: int | None = Field(default=None, ge=1, le=MAX_DAYS)

    summarizer_model: str | None = None
    summarizer_base_url: str | None = None
    summarizer_api_key: SecretStr | None = None
    summarizer_timeout: float = Field(default=60.0, gt=0, le=600)
    summarizer_output: int = Field(default=4_096, ge=64, le=32_000)
    summarizer_window: int = Field(default=32_000, ge=2_000, le=2_000_000)
    summarizer_daily_calls: int = Field(default=200, ge=0, le=1_000_000)
    summarizer_daily_tokens: int = Field(default=2_000_000, ge=0, le=1_000_000_000)
    summarizer_input_price: float | None = Field(default=None, ge=0, le=100_000)
    summarizer_output_price: float | None = Field(default=None, ge=0, le=100_000)

    embeddings_base_url: str | None = None
    embeddings_model: str | None = None
    embeddings_api_key: SecretStr | None = None
    embeddings_timeout: float = Field(default=30.0, gt=0, le=600)

    query_children: int = Field(default=4, ge=1, le=64)
    query_seconds: float = Field(default=2.0, ge=0.1, le=15)
    query_memory: int = Field(default=256 * 1024 * 1024, ge=64 * 1024 * 1024, le=8 * 1024**3)

    prices: Path | None = None

    auth: Literal["off", "keys"] = "off"
    admin_key: SecretStr | None = Field(default=None, min_length=16)
    limits: Annotated[LimitSettings, NoDecode] = LimitSettings()
    insecure: bool = False
    cors_origins: str | None = None
    passthrough: str | None = None
    max_body: int = Field(default=32 * 1024 * 1024, ge=1024, le=1024**3)
    body_memory: int = Field(default=512, ge=16, le=1024 * 1024)
    max_reply: int = Field(default=16 * 1024 * 1024, ge=64 * 1024, le=64 * 1024 * 1024)
    max_messages: int = Field(default=20_000, ge=1000, le=1_000_000)
    header_timeout: float = Field(default=15.0, gt=0)
    header_bytes: int = Field(default=32 * 1024, ge=4096, le=1024**2)
    header_count: int = Field(default=200, ge=20, le=10_000)
    header_connections: int = Field(default=1024, ge=16, le=1_000_000)
    body_timeout: float = Field(default=60.0, gt=0)
    shutdown_grace: float = Field(default=30.0, ge=0, le=3600)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("live_sessions")
    @classmethod
    def _is_size(cls, value: str) -> str:
        if value != "off" and not (value.isascii() and value.isdigit() and int(value) <= MOST_LIVE_SESSIONS):
            raise ValueError(f"must be off, or a number of MiB up to {MOST_LIVE_SESSIONS}")
        return value

    @property
    def live_sessions_budget(self) -> int:
        """Bytes of memory for live sessions; 0: none are kept."""
        return 0 if self.live_sessions == "off" else int(self.live_sessions) * 1024 * 1024

    @property
    def session_cache_budget(self) -> int:
        """Bytes of memory for each cache of what is stored of sessions: an eighth of the live sessions' if there are
        any, so that they are full about when those are.
        """
        return self.live_sessions_budget // 8 or SESSION_CACHE

    def base_urls(self) -> list[tuple[str, str]]:
        """Return the base URLs of all model hosts, each with the name of its setting."""
        names = ("openai", "anthropic", "gemini", "gemini_gca", "summarizer", "embeddings")
        own = [(f"{PREFIX}{name.upper()}_BASE_URL", getattr(self, f"{name}_base_url")) for name in names]
        named = [(f"base_url of upstreams.{name}", host.base_url) for name, host in self.upstreams.items()]
        return [(name, url) for name, url in own + named if url is not None]

    @field_validator(
        "openai_base_url",
        "anthropic_base_url",
        "gemini_base_url",
        "gemini_gca_base_url",
        "summarizer_base_url",
        "embeddings_base_url",
    )
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        return None if value is None else check_address(value)

    @field_validator(*sorted(NESTED), mode="before")
    @classmethod
    def _is_json(cls, value: object) -> object:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"is not valid JSON: {error}") from error

    @field_validator("upstreams")
    @classmethod
    def _have_names(cls, value: dict[str, UpstreamSettings]) -> dict[str, UpstreamSettings]:
        for name in value:
            if not HOST_NAME.fullmatch(name):
                raise ValueError(f"{name[:40]!r} is not a valid host name: 1 to 64 letters, digits, - and _")
        return value

    @field_validator("embeddings_model")
    @classmethod
    def _has_host(cls, value: str | None, given: ValidationInfo) -> str | None:
        if value and not given.data.get("embeddings_base_url"):
            raise ValueError("needs TERSELY_EMBEDDINGS_BASE_URL")
        return value

    @field_validator("tools")
    @classmethod
    def _names_tools(cls, value: str | None) -> str | None:
        try:
            parse_offer(value or "off")
        except InvalidRequest as error:
            raise ValueError(error.detail.removeprefix("tools ")) from error
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str | None) -> str | None:
        for origin in split_list(value):
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin[:100]!r} is not an origin such as https://app.example.com; `*` is not possible"
                )
        return value

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Return the origins whose web pages may call the APIs."""
        return split_list(self.cors_origins)

    @field_validator("passthrough")
    @classmethod
    def _has_rules(cls, value: str | None) -> str | None:
        try:
            parse_passthrough(value or "")
        except InvalidRequest as error:
            raise ValueError(error.detail) from error
        return value

    @property
    def offered_tools(self) -> tuple[str, ...] | None:
        """The tools that models are offered; None: each strategy's own."""
        return None if self.tools is None else parse_offer(self.tools)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_unset(cls, values: dict[str, object]) -> dict[str, object]:
        """`NAME=` in an environment file means: the default."""
        return {name: value for name, value in values.items() if value != ""}

    @override
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments win over the environment, the environment over files."""
        return init_settings, env_settings, dotenv_settings, TomlConfigSettingsSource(settings_cls)


def split_list(text: str | None) -> tuple[str, ...]:
    """Return the parts of a list with commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _variable(name: str) -> str:
    """Return the environment's name of a setting."""
    upper = name.upper()
    return upper if upper.startswith(PREFIX) or upper == "DATABASE_URL" else PREFIX + upper


def load_settings() -> Settings:
    """Return the settings. Raises `InvalidSettings` with a line for each error."""
    try:
        return Settings()
    except ValidationError as error:
        raise InvalidSettings(explain(error)) from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidSettings(f"{TOML_FILE}: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidSettings(f"{ENVIRONMENT_FILE} or {TOML_FILE} is not UTF-8 text") from error
    except OSError as error:
        raise InvalidSettings(f"{error.filename}: {error.strerror or type(error).__name__}") from error


def unknown_settings(environment: Iterable[str]) -> list[str]:
    """Return an error for each variable that looks like a setting but is unknown."""
    return [f"{name} is no setting: ignored" for name in _unknown_variables(environment)]


def unknown_settings_in_files() -> list[str]:
    """Return an error for each entry of the two files that is no setting. The files must be readable."""
    variables = _unknown_variables(DotEnvSettingsSource(Settings).env_vars)
    names = [name for name in variables if name not in OF_COMPOSE]
    entries = TomlConfigSettingsSource(Settings).toml_data
    known = {*Settings.model_fields, "DATABASE_URL", f"{PREFIX}DATABASE_URL"}
    return [
        *(f"{name} in {ENVIRONMENT_FILE} is no setting: ignored" for name in names),
        *(f"{name} in {TOML_FILE} is no setting: ignored" for name in sorted(set(entries) - known)),
    ]


def _unknown_variables(given: Iterable[str]) -> list[str]:
    known = {_variable(name) for name in Settings.model_fields} | {f"{PREFIX}DATABASE_URL"} | OF_COMMANDS
    names = {name.upper() for name in given}
    return sorted(name for name in names - known if name.startswith(PREFIX) and not name.startswith(INTERNAL))


def explain(error: ValidationError) -> str:
    """Return the errors of the settings: variable, reason or range, and the value unless it is a secret."""
    lines = []
    for each in error.errors():
        name = str(each["loc"][0]) if each["loc"] else ""
        variable = _variable(name) if name else "settings"
        field = Settings.model_fields.get(name)
        # The value of a host that lacks a field contains its other fields, including its key.
        is_secret = field is None or name == "upstreams" or "SecretStr" in str(field.annotation)
        variable += "".join(f".{part}" for part in each["loc"][1:] if name in NESTED)
        reason = each["msg"].removeprefix("Value error, ")
        value = repr(each["input"])[:100]
        lines.append(f"{variable}: {reason}" + ("" if is_secret or value in reason else f", not {value}"))
        bounds = [text for text in map(_bound, field.metadata) if text] if field else []
        if len(bounds) > 1:
            lines[-1] += f" (range: {', '.join(bounds)})"
    return "\n".join(lines)


def _bound(rule: object) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return ", ".join(f"{sign} {getattr(rule, name)}" for name, sign in signs.items() if hasattr(rule, name))
