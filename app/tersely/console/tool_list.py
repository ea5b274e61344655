"""Write the tools that a call sent, one by one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tersely.dialects.tool_rounds import tool_names
from tersely.dialects.wire import raw_json
from tersely.service.sessions.call_infos import CallTools
from tersely.service.sessions.comparisons import readable

MAX_DEFINITION = 20_000
"""Characters of one definition that a page shows."""
_LISTS = ("functionDeclarations", "function_declarations")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """A tool's definition as text. ``is_own``: Tersely added it. ``omitted``: number of characters that were cut."""

    name: str
    text: str
    is_own: bool
    omitted: int


def list_tools(tools: CallTools) -> list[ListedTool]:
    """Return the tools, Tersely's first; of a list that cannot be read nothing."""
    try:
        definitions = [each for raw in raw_json.split_array(tools.raw or b"[]") for each in _split(raw_json.load(raw))]
    except ValueError:
        return []
    listed = []
    for definition in definitions:
        names = sorted(tool_names(raw_json.dump([definition])))
        name = ", ".join(names) or str(definition.get("type", "") if isinstance(definition, dict) else "")
        text = readable(json.dumps(definition, ensure_ascii=False, indent=1))
        listed.append(
            ListedTool(
                name=readable(name)[:200] or "without a name",
                text=text[:MAX_DEFINITION],
                is_own=bool(names) and set(names) <= set(tools.own),
                omitted=max(0, len(text) - MAX_DEFINITION),
            )
        )
    return sorted(listed, key=lambda each: not each.is_own)


def _split(tool: Any) -> list[Any]:
    """Return the declarations of a tool; Gemini's have several."""
    if not isinstance(tool, dict):
        return [tool]
    declared = [each for name in _LISTS if isinstance(tool.get(name), list) for each in tool[name]]
    rest = {name: value for name, value in tool.items() if name not in _LISTS}
    return [*declared, *([rest] if rest else [])]
