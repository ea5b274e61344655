"""Give a command on one session its common options: which session, which service, and the form of the output."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tersely.cli.connection import (
    MAIN,
    AsJson,
    Key,
    Local,
    ServiceTarget,
    SessionId,
    Url,
    request,
    run_command,
    session_path,
    target_of,
)
from tersely.cli.printing import print_json, print_text

_OPTIONS = (("session", SessionId, MAIN), ("url", Url, None), ("key", Key, None), ("local", Local, False))
_AS_JSON = ("as_json", AsJson, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCommand:
    """The common options of a command on one session."""

    target: ServiceTarget
    session: str
    as_json: bool

    def request(self, method: str, *steps: str, **options: Any) -> Any:
        """Return the JSON of a response about the session; ``options`` as `httpx` has it. Raises `CommandError`."""
        return request(self.target, method, session_path(self.session, *steps), **options)

    def run(self, *words: str) -> str:
        """Return the text of a chat command. Raises `CommandError`."""
        return run_command(self.target, self.session, *words)

    def print(self, answer: Any, text: str) -> None:
        """Print ``answer`` with ``--json``, else ``text``."""
        if self.as_json:
            print_json(answer)
        else:
            print_text(text)


def session_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return ``function`` as a command: its own parameters, without the `SessionCommand`, then the common options."""

    def command(**values: Any) -> None:
        target = target_of(values.pop("url"), values.pop("key"), values.pop("local"))
        common = SessionCommand(target=target, session=values.pop("session"), as_json=values.pop("as_json"))
        function(common, **values)

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in (*_OPTIONS, _AS_JSON)
    ]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    command.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *common)}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command
