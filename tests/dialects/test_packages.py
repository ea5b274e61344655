"""Every dialect is a package with the same modules."""

from pathlib import Path

import pytest

from tersely import dialects
from tersely.dialects.registry import DIALECTS

ROOT = Path(dialects.__file__).parent
# What a registered dialect needs; and modules that a wire format may need besides.
REQUIRED = {"dialect", "local_reply", "read", "stream", "tools", "whole", "write"}
OPTIONAL = {
    "accumulator",  # the blocks or items of a stream, as they grow
    "caching",  # where a request marks what the provider shall cache
    "completion",  # a plain question, for summaries
    "content",  # the parts that a message consists of
    "stored_history",  # histories and replies that the provider keeps
    "stream_events",  # the parsed events of a stream
    "tool_rounds",  # tool calls that Tersely answers
}


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_dialect_package_has_the_modules_of_every_dialect(name: str) -> None:
    modules = {path.stem for path in (ROOT / name).glob("*.py")} - {"__init__"}
    assert modules >= REQUIRED
    assert modules <= REQUIRED | OPTIONAL
