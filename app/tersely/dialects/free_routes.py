"""The one rule for which requests are calls of a model, so that their tokens and their money count towards limits.

Every POST is one, but for the routes listed here: what a client uses up at a path that nobody here knows must count
too.
"""

from __future__ import annotations

import re

# The characters of a plain segment. A path with others may mean another one to a host, and is no free route.
_PLAIN = r"\w.:@+=~-"
_FREE = (
    # Counting tokens.
    "/v1/(?:responses/input_tokens|messages/count_tokens|tokenize-text)",
    "/v1(?:beta|alpha)?/(?:models|tunedModels)/*:count(?:|Text|Message)Tokens",
    # Stored replies and conversations. Their replies may repeat the usage of an earlier call.
    "/v1/(?:responses/*/cancel|chat/completions/*)",
    "/v1/(?:conversations|assistants)**",
    "/v1/threads(?:|/thread_*|/*/messages|/*/messages/*|/*/runs/*|/*/runs/*/cancel)",
    # Files and what is made of them: their bytes are the input of no model yet.
    "/v1/(?:files|uploads|containers|vector_stores|skills)**",
    "/upload/v1(?:beta|alpha)?/(?:files|fileSearchStores)**",
    "/v1(?:beta|alpha)/files:*",
    # Jobs: a host works on them later, and reports their usage elsewhere.
    "/v1/(?:batches|fine_tuning|evals)**",
    "/v1/messages/batches/*/cancel",
    "/v1(?:beta|alpha)/(?:batches|operations)/*:cancel",
    # The account.
    "/v1/(?:organization|organizations|projects)**",
    r"/v1internal:(?:countTokens|loadCodeAssist|onboardUser|retrieveUserQuota|(?:fetch|get|list|record|set)\w+)",
)


def _pattern(route: str) -> str:
    """Return the expression of a route. ``*`` is anything within a segment, ``**`` any number of segments."""
    return re.sub(r"\*\*|\*", lambda found: f"[{_PLAIN}]+" if found[0] == "*" else f"(?:/[{_PLAIN}]+)*", route)


_is_free = re.compile("|".join(map(_pattern, _FREE)), re.ASCII).fullmatch


def is_model_call(method: str, path: str) -> bool:
    """Return whether a model works for a request. ``path``: decoded, by OpenAI's own names where it is one of Azure's.

    A batch of requests in one body is a call, too.
    """
    return method == "POST" and _is_free(path) is None
