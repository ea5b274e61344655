"""The settings, read once from the environment, ``.env`` or ``tersely.toml``, by `app.main` and the CLI alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from typing_extensions import override

OnOff = Literal["on", "off"]
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


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
    connect_timeout: float = Field(default=10.0, gt=0)
    first_byte_timeout: float = Field(default=600.0, gt=0)
    idle_timeout: float = Field(default=300.0, gt=0)
    heartbeat: float = Field(default=15.0, gt=0)
    cache_ttl: float = Field(default=300.0, ge=0)

    strategy: str = "slim"
    epoch: str = "auto"
    references: int | None = Field(default=None, ge=0, le=100_000)
    instructions: OnOff = "on"
    derive_terse: OnOff = "on"
    fail_open: OnOff = "on"

    auth: Literal["off", "keys"] = "off"
    insecure: bool = False
    max_body: int = Field(default=32 * 1024 * 1024, ge=1024, le=1024**3)
    header_timeout: float = Field(default=15.0, gt=0)
    body_timeout: float = Field(default=60.0, gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("openai_base_url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ValueError(f"{value!r} is not an http(s) address")
        return value.rstrip("/")

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
