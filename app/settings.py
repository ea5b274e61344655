"""The settings, read once from the environment, ``.env`` or ``tersely.toml``, by `app.main` and the CLI alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from typing_extensions import override

from app.domain.errors import InvalidRequest
from app.domain.tool_catalog import parse_offer

OnOff = Literal["on", "off"]
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


PREFIX = "TERSELY_"
# What the service tells its own workers.
INTERNAL = "TERSELY_RUNNING_"
# What the commands read that work with a running service.
OF_COMMANDS = frozenset({"TERSELY_URL", "TERSELY_KEY", "TERSELY_SESSION"})


class Settings(BaseSettings):
    """Every setting, under the names of the environment. Sizes in bytes, times in seconds."""

    model_config = SettingsConfigDict(
        env_prefix="TERSELY_", env_file=".env", toml_file="tersely.toml", extra="ignore", frozen=True
    )

    database_url: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("DATABASE_URL", "TERSELY_DATABASE_URL")
    )
    database_pool: int = Field(default=10, ge=1, le=500)
    database_timeout: float = Field(default=5.0, gt=0, le=60)
    database_pooler: OnOff = "off"
    data_dir: Path | None = None

    openai_base_url: str = "https://api.openai.com/v1"
    openai_api_key: SecretStr | None = None
    anthropic_base_url: str = "https://api.anthropic.com"
    anthropic_api_key: SecretStr | None = None
    gemini_base_url: str = "https://generativelanguage.googleapis.com"
    gemini_api_key: SecretStr | None = None
    gemini_gca_base_url: str = "https://cloudcode-pa.googleapis.com"
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
    chat_commands: OnOff = "off"
    derive_terse: OnOff = "on"
    fail_open: OnOff = "on"

    cleanup_days: int | None = Field(default=None, ge=1, le=36_500)

    summarizer_model: str | None = None
    summarizer_base_url: str | None = None
    summarizer_api_key: SecretStr | None = None
    summarizer_timeout: float = Field(default=60.0, gt=0, le=600)
    summarizer_output: int = Field(default=4_096, ge=64, le=32_000)
    summarizer_window: int = Field(default=32_000, ge=2_000, le=2_000_000)

    embeddings_base_url: str | None = None
    embeddings_model: str | None = None
    embeddings_api_key: SecretStr | None = None
    embeddings_timeout: float = Field(default=30.0, gt=0, le=600)

    query_children: int = Field(default=4, ge=1, le=64)
    query_seconds: float = Field(default=2.0, ge=0.1, le=15)
    query_memory: int = Field(default=256 * 1024 * 1024, ge=64 * 1024 * 1024, le=8 * 1024**3)

    auth: Literal["off", "keys"] = "off"
    insecure: bool = False
    max_body: int = Field(default=32 * 1024 * 1024, ge=1024, le=1024**3)
    header_timeout: float = Field(default=15.0, gt=0)
    body_timeout: float = Field(default=60.0, gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

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
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ValueError(f"{value!r} is not an http(s) address")
        return value.rstrip("/")

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
        del file_secret_settings
        return init_settings, env_settings, dotenv_settings, TomlConfigSettingsSource(settings_cls)


def _variable(name: str) -> str:
    """The environment's name of a setting."""
    upper = name.upper()
    return upper if upper.startswith(PREFIX) or upper == "DATABASE_URL" else PREFIX + upper


def unknown_settings(environment: Iterable[str]) -> list[str]:
    """What is wrong with variables that look like settings and are none, each named."""
    known = {_variable(name) for name in Settings.model_fields} | {PREFIX + "DATABASE_URL"} | OF_COMMANDS
    unknown = sorted(
        name
        for name in {given.upper() for given in environment}
        if name.startswith(PREFIX) and not name.startswith(INTERNAL) and name not in known
    )
    return [f"{name} is no setting: ignored" for name in unknown]


def explain(error: ValidationError) -> str:
    """What is wrong with the settings: variable, reason or range, and the value unless it is a secret."""
    lines = []
    for each in error.errors():
        name = str(each["loc"][0]) if each["loc"] else ""
        variable = _variable(name) if name else "settings"
        field = Settings.model_fields.get(name)
        is_secret = field is None or "SecretStr" in str(field.annotation)
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
