"""Choose the model host of a request, among the default host of each dialect and further hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tersely.domain.errors import NotFound
from tersely.domain.messages import Dialect as DialectName
from tersely.service.proxy.proxy import Proxy
from tersely.service.proxy.sending.account_access import AccountAccess

# `/u/NAME/...`: the rest of the path is for the host of that name.
_NAMED = re.compile(r"/u/(?P<name>[A-Za-z0-9_-]{1,64})(?P<rest>/.*)", re.DOTALL)
# Bodies in these dialects may name a model as `models/gemini-2.5-pro`.
_WITH_PREFIX: frozenset[DialectName] = frozenset({"gemini", "gemini_gca"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEntry:
    """A host: the proxy of each dialect it speaks, and patterns of the models that it serves.

    ``access`` guards the operator's account there, where tenants share it. ``is_azure``: it has Azure OpenAI's paths.
    """

    name: str
    proxies: Mapping[DialectName, Proxy]
    models: Sequence[str] = ()
    access: AccountAccess | None = None
    is_azure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The proxy of one model host, and the guard of the operator's account at that host. ``name`` is empty for the
    default host of a dialect.
    """

    proxy: Proxy
    access: AccountAccess | None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTable:
    """The default host of each dialect, and the named ones in their order."""

    defaults: Mapping[DialectName, Destination]
    named: Sequence[HostEntry] = field(default=())

    def find(self, dialect: DialectName, name: str, *, is_azure: bool = False) -> Destination:
        """Return where a request goes before its model is known. ``name``: the host in its path, or empty.

        Raises `NotFound` for a host that is not there, or does not speak the dialect.
        """
        if not name and not is_azure:
            return self.defaults[dialect]
        for host in self.named:
            if name in ("", host.name) and host.is_azure == is_azure and dialect in host.proxies:
                return _destination(host, dialect)
        if name:
            raise NotFound(f"there is no host {name} that speaks {dialect}: TERSELY_UPSTREAMS names the hosts")
        raise NotFound("there is no Azure host: name one with the dialect azure in TERSELY_UPSTREAMS")

    def has_models(self, dialect: DialectName, *, is_azure: bool) -> bool:
        """Return whether the model of a request may choose its host."""
        return bool(self.named) and any(
            host.models and dialect in host.proxies and host.is_azure == is_azure for host in self.named
        )

    def find_by_model(self, dialect: DialectName, model: str, *, is_azure: bool) -> Destination | None:
        """Return the first host that serves the model; None if there is none."""
        if dialect in _WITH_PREFIX:
            model = model.removeprefix("models/")
        for host in self.named:
            if dialect not in host.proxies or host.is_azure != is_azure:
                continue
            if any(fnmatchcase(model, pattern) for pattern in host.models):
                return _destination(host, dialect)
        return None


def _destination(host: HostEntry, dialect: DialectName) -> Destination:
    return Destination(proxy=host.proxies[dialect], access=host.access, name=host.name)


def split_name(path: str) -> tuple[str, str]:
    """Return the name of the host in a path, and the rest; an empty name and the path where there is none."""
    found = _NAMED.fullmatch(path)
    return (found["name"], found["rest"]) if found is not None else ("", path)
