"""Tenants, keys and their limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tersely.api.rest.schemas.common import MAX_SEQ, Body
from tersely.domain.limits import MAX_DAYS


class NewTenant(Body):
    """A tenant without keys."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tenant": "acme"}]})

    tenant: str = Field(min_length=1, max_length=128, description="Letters, digits, and `. _ @ : -` (not first).")


class NewKey(Body):
    """A key of a tenant. The tenant is created with its first key."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tenant": "acme", "name": "laptop", "scope": "proxy"}]})

    tenant: str = Field(min_length=1, max_length=128)
    name: str = Field("", max_length=200, description="A label for the key.")
    scope: Literal["read", "proxy"] | None = Field(
        None, description="`read`: only read over REST; `proxy`: only call models; null: everything."
    )
    client: str | None = Field(
        None,
        min_length=1,
        max_length=32,
        description="The only client that may use it, as lists of calls name it: a-z, 0-9, and `. _ -` (not first).",
    )
    days: int | None = Field(None, ge=1, le=MAX_DAYS, description="Days after which the key expires.")


Count = Annotated[int | None, Field(ge=0, le=MAX_SEQ)]
Amount = Annotated[float | None, Field(ge=0, le=MAX_SEQ, strict=False)]
PER_MINUTE = "Requests, proxied and REST, in any 60 seconds."
CONCURRENT = "Proxied requests under way at a time."
PER_DAY = "Tokens of model calls, sent and answered, in a day (UTC), as the provider reports them."
PER_MONTH = "USD of model calls in a month (UTC), where the model's price is known."
STORED = "Bytes of the messages that are stored."


class KeyLimitsIn(Body):
    """Limits of a key, beside those of its tenant; null: none."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"requests_per_minute": 60, "money_per_month": 20}]})

    requests_per_minute: Count = Field(None, description=PER_MINUTE)
    concurrent: Count = Field(None, description=CONCURRENT)
    tokens_per_day: Count = Field(None, description=PER_DAY)
    money_per_month: Amount = Field(None, description=PER_MONTH)


class LimitsIn(KeyLimitsIn):
    """Limits of a tenant; null: the configured default."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"requests_per_minute": 600, "concurrent": 20, "tokens_per_day": 5_000_000}]}
    )

    stored_bytes: Count = Field(None, description=STORED)
    retention_days: int | None = Field(
        None, ge=1, le=MAX_DAYS, description="Sessions go after so many idle days; null: as configured."
    )


class KeyLimits(BaseModel):
    """Limits of a key; null: none."""

    requests_per_minute: int | None = Field(description=PER_MINUTE)
    concurrent: int | None = Field(description=CONCURRENT)
    tokens_per_day: int | None = Field(description=PER_DAY)
    money_per_month: float | None = Field(description=PER_MONTH)


class EffectiveLimits(KeyLimits):
    """The effective limits: the tenant's own, or else the configured defaults."""

    stored_bytes: int | None = Field(description=STORED)


class TenantLimits(EffectiveLimits):
    """A tenant's own limits; null: the configured default."""

    retention_days: int | None = Field(description="Sessions go after so many idle days.")


class KeyUse(BaseModel):
    """The used part of the limits. Workers take up to a hundredth of a limit ahead of need."""

    requests_per_minute: int
    concurrent: int
    tokens_per_day: int
    money_per_month: float


class TenantUse(KeyUse):
    """The use of a tenant. Only limited quantities are counted; `stored_bytes` is null until it is measured."""

    stored_bytes: int | None


class KeyLimitsOut(BaseModel):
    """A key's limits and use."""

    limits: KeyLimits
    used: KeyUse


class TenantLimitsOut(BaseModel):
    """A tenant's limits and use."""

    limits: TenantLimits
    effective: EffectiveLimits
    used: TenantUse


class KeyOut(BaseModel):
    """A key without its secret."""

    id: str
    tenant: str
    name: str
    scope: Literal["read", "proxy"] | None
    client: str | None
    created_at: str
    expires_at: str | None
    revoked_at: str | None


class NewKeyOut(KeyOut):
    """A new key."""

    key: str = Field(description="The key itself. It is shown this once.")


class KeyPage(BaseModel):
    """Keys by tenant, oldest first."""

    items: list[KeyOut]
    next: str | None


class LimitedKeyOut(KeyOut, KeyLimitsOut):
    """A key with its limits and use."""


class TenantOut(TenantLimitsOut):
    """A tenant with limits, use and keys."""

    tenant: str
    created_at: str | None = Field(description="null for the tenant that needs no key.")
    keys: list[LimitedKeyOut]


class TenantPage(BaseModel):
    """Tenants by name."""

    items: list[TenantOut]
    next: str | None
