"""Read the conversation files of agents: sessions of Claude Code, Codex, Gemini CLI (and its checkpoints) and pi.

The last branch counts. Summaries of the agent's own compaction are left out, so that the conversation stays as it was.
System prompts and tool definitions are present only where the agent writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tersely.domain.messages import Dialect as DialectName
from tersely.transcripts.conversations import TIME

Line = Mapping[str, Any]
AgentFile = tuple[DialectName, dict[str, Any]]

_LOOKED_AT = 50


def read_agent_file(lines: Sequence[Line]) -> AgentFile | None:
    """Return the dialect and the conversation of an agent's own file; None for any other file."""
    for is_theirs, dialect, read in _AGENTS:
        if is_theirs(lines[:_LOOKED_AT]):
            return dialect, {"model": _model_in(lines), **read(lines)}
    return None


def _model_in(lines: Sequence[Line]) -> str:
    """Return the model of the last line that names one: in the line, its message, or its payload."""
    for line in reversed(lines):
        for holder in (_dict(line.get("message")), _dict(line.get("payload")), line):
            if isinstance(model := holder.get("model"), str) and model and not model.startswith("<"):
                return model
    return ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _time(line: Line) -> dict[str, str]:
    """Return the annotation of a message with the time of its line; empty without one."""
    time = line.get("timestamp")
    return {TIME: time} if isinstance(time, str) else {}


def _is_of_type(line: Line, *kinds: str) -> bool:
    return line.get("type") in kinds


# Claude Code: ~/.claude/projects/*/*.jsonl


def _is_claude(lines: Sequence[Line]) -> bool:
    return any(
        "parentUuid" in line and "uuid" in line and isinstance(line.get("message"), dict)
        for line in lines
        if _is_of_type(line, "user", "assistant")
    )


def _read_claude(lines: Sequence[Line]) -> dict[str, Any]:
    """Read a Claude Code session. Each line holds one block, so parallel calls are on branches of their own."""
    messages = [line for line in lines if _is_of_type(line, "user", "assistant") and _is_message(line)]
    branch = _branch_of_claude(lines, messages)
    replies = {_reply_id(line) for line in messages if line.get("uuid") in branch} - {None}
    kept = [line for line in messages if line.get("uuid") in branch or _reply_id(line) in replies]
    calls = {block.get("id") for line in kept for block in _blocks(line) if block.get("type") == "tool_use"}
    kept_ids = {line.get("uuid") for line in kept}
    ours = [line for line in messages if line.get("uuid") in kept_ids or _answers(line, calls)]
    return {"messages": _joined(ours)}


def _is_message(line: Line) -> bool:
    message = _dict(line.get("message"))
    is_beside = line.get("isSidechain") or line.get("isCompactSummary") or line.get("isApiErrorMessage")
    return bool(message.get("content")) and not is_beside


def _branch_of_claude(lines: Sequence[Line], messages: Sequence[Line]) -> set[object]:
    """Return the ids on the way from the last message back to the first, across the agent's own compactions."""
    known = {line["uuid"]: line for line in lines if isinstance(line.get("uuid"), str)}
    branch: set[object] = set()
    at: object = messages[-1].get("uuid") if messages else None
    while isinstance(at, str) and at in known and at not in branch:
        branch.add(at)
        at = known[at].get("parentUuid") or known[at].get("logicalParentUuid")
    return branch


def _reply_id(line: Line) -> object:
    return _dict(line.get("message")).get("id") if _is_of_type(line, "assistant") else None


def _blocks(line: Line) -> list[dict[str, Any]]:
    return [block for block in _list(_dict(line.get("message")).get("content")) if isinstance(block, dict)]


def _answers(line: Line, calls: set[object]) -> bool:
    return any(block.get("type") == "tool_result" and block.get("tool_use_id") in calls for block in _blocks(line))


def _joined(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """The blocks of one reply are one message, and so is what the user says until the next one."""
    messages: list[dict[str, Any]] = []
    replies: dict[object, dict[str, Any]] = {}
    for line in lines:
        content = line["message"]["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        reply_id = _reply_id(line)
        time = _time(line)
        if reply_id in replies:
            replies[reply_id]["content"] += blocks
        elif reply_id is None and messages and messages[-1]["role"] == "user":
            messages[-1] |= {"content": messages[-1]["content"] + blocks, **time}
        else:
            messages.append({"role": "user" if line["type"] == "user" else "assistant", "content": blocks, **time})
            if reply_id is not None:
                replies[reply_id] = messages[-1]
    for message in messages:
        # Results come first, as the provider wants them.
        message["content"].sort(key=lambda block: _dict(block).get("type") != "tool_result")
    return messages


# Codex: ~/.codex/sessions/**/rollout-*.jsonl


def _is_codex(lines: Sequence[Line]) -> bool:
    return any(_is_of_type(line, "session_meta", "response_item") and "payload" in line for line in lines)


def _read_codex(lines: Sequence[Line]) -> dict[str, Any]:
    head = next((_dict(line["payload"]) for line in lines if _is_of_type(line, "session_meta")), {})
    base = head.get("base_instructions") or head.get("instructions")
    instructions = base.get("text") if isinstance(base, dict) else base
    items = [(_dict(line.get("payload")), _time(line)) for line in lines if _is_of_type(line, "response_item")]
    messages = [
        {**item, **time} for item, time in items if item and item.get("type") not in {"ghost_snapshot", "compaction"}
    ]
    return {**({"instructions": instructions} if isinstance(instructions, str) else {}), "input": messages}


# Gemini CLI: ~/.gemini/tmp/*/chats/*.jsonl, older ones .json; checkpoint-*.json


def _is_gemini_chat(lines: Sequence[Line]) -> bool:
    return bool(lines) and "sessionId" in lines[0] and "projectHash" in lines[0]


def _read_gemini_chat(lines: Sequence[Line]) -> dict[str, Any]:
    records: dict[object, Line] = {each.get("id"): each for each in _list(lines[0].get("messages"))}
    for line in lines[1:]:
        if "$rewindTo" in line:
            ids = list(records)
            for gone in ids[ids.index(line["$rewindTo"]) if line["$rewindTo"] in records else 0 :]:
                del records[gone]
        elif isinstance(line.get("id"), str):
            records[line["id"]] = line
        elif isinstance(listed := _dict(line.get("$set")).get("messages"), list):
            records = {each.get("id"): each for each in listed}
    return {"contents": [content for record in records.values() for content in _with_time(record)]}


def _with_time(record: Line) -> Iterator[dict[str, Any]]:
    """Return the contents of a record with its time."""
    return ({**content, **_time(record)} for content in _contents(record))


def _contents(record: Line) -> Iterator[dict[str, Any]]:
    """Return the contents that the agent resumes from a record. Its commands were never sent."""
    parts = _parts(record.get("content"))
    if record.get("type") == "user":
        if parts and not str(parts[0].get("text", "")).startswith(("/", "?")):
            yield {"role": "user", "parts": parts}
        return
    if record.get("type") != "gemini":
        return
    calls = [call for call in _list(record.get("toolCalls")) if isinstance(call, dict)]
    ids = {_dict(part.get("functionCall")).get("id") for part in parts} - {None}  # some stand in both
    made = [
        {"functionCall": {key: call[key] for key in ("id", "name", "args") if key in call}}
        for call in calls
        if call.get("id") not in ids
    ]
    if parts or made:
        yield {"role": "model", "parts": [*parts, *made]}
    results = [part for call in calls for part in _results(call)]
    if results:
        yield {"role": "user", "parts": results}


def _parts(content: object) -> list[dict[str, Any]]:
    listed = content if isinstance(content, list) else [content]
    parts = [{"text": each} if isinstance(each, str) else _dict(each) for each in listed]
    return [part for part in parts if part and part.get("text") != ""]


def _results(call: Line) -> list[dict[str, Any]]:
    result = call.get("result")
    if isinstance(result, str):
        response = {"name": call.get("name"), "response": {"output": result}}
        return [{"functionResponse": {**({"id": call["id"]} if "id" in call else {}), **response}}]
    return _parts(result)


def _is_checkpoint(lines: Sequence[Line]) -> bool:
    return len(lines) == 1 and isinstance(lines[0].get("history"), list)


def _read_checkpoint(lines: Sequence[Line]) -> dict[str, Any]:
    return {"contents": lines[0]["history"]}


# pi: ~/.pi/agent/sessions/**/*.jsonl


def _is_pi(lines: Sequence[Line]) -> bool:
    return bool(lines) and _is_of_type(lines[0], "session") and "cwd" in lines[0]


def _read_pi(lines: Sequence[Line]) -> dict[str, Any]:
    """Return a message in the agent's own form suits every provider; here it becomes that of chat completions.

    Replies that broke off are left out, as the agent itself leaves them out of its requests.
    """
    entries = [line for line in lines[1:] if _is_of_type(line, "message")]
    branch = _branch_of_pi(lines)
    ours = entries if branch is None else [entry for entry in entries if entry.get("id") in branch]
    messages = [(_chat_message(_dict(entry.get("message"))), _time(entry)) for entry in ours]
    return {"messages": [{**message, **time} for message, time in messages if message]}


def _branch_of_pi(lines: Sequence[Line]) -> set[object] | None:
    """Return the ids on the way from the last entry back; None in older files, which have no branches."""
    known = {line["id"]: line for line in lines[1:] if isinstance(line.get("id"), str)}
    if not known:
        return None
    branch: set[object] = set()
    at: object = next(reversed(known))
    while isinstance(at, str) and at in known and at not in branch:
        branch.add(at)
        at = known[at].get("parentId")
    return branch


def _chat_message(message: Line) -> dict[str, Any] | None:
    content = message.get("content")
    match message.get("role"):
        case "user":
            return {"role": "user", "content": content if isinstance(content, str) else _chat_parts(content)}
        case "assistant" if message.get("stopReason") not in {"aborted", "error"}:
            blocks = [_dict(block) for block in _list(content)]
            calls = [_chat_call(block) for block in blocks if block.get("type") == "toolCall"]
            text = _text(content)
            return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}
        case "toolResult":
            return {"role": "tool", "tool_call_id": message.get("toolCallId"), "content": _text(content)}
        case "bashExecution" if not message.get("excludeFromContext"):
            output = f"```\n{message['output']}\n```" if message.get("output") else "(no output)"
            return {"role": "user", "content": f"Ran `{message.get('command')}`\n{output}"}
        case _:
            return None


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(block.get("text") or "") for block in _list(content) if _dict(block).get("type") == "text")


def _chat_parts(content: object) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for block in map(_dict, _list(content)):
        if block.get("type") == "text":
            parts.append({"type": "text", "text": block.get("text")})
        elif block.get("type") == "image":
            url = f"data:{block.get('mimeType')};base64,{block.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def _chat_call(block: Line) -> dict[str, Any]:
    arguments = json.dumps(block.get("arguments") or {}, separators=(",", ":"), ensure_ascii=False)
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


_AGENTS: Sequence[tuple[Callable[[Sequence[Line]], bool], DialectName, Callable[[Sequence[Line]], dict[str, Any]]]] = (
    (_is_claude, "anthropic", _read_claude),
    (_is_codex, "openai_responses", _read_codex),
    (_is_gemini_chat, "gemini", _read_gemini_chat),
    (_is_checkpoint, "gemini", _read_checkpoint),
    (_is_pi, "openai_chat", _read_pi),
)
