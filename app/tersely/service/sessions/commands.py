"""The commands of a chat, carried out: what its user types instead of something for the model."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields
from typing import Any

from tersely.domain.chat_commands import HELP, Command, is_command, parse_command
from tersely.domain.errors import InvalidRequest, TerselyError
from tersely.domain.history.history import DEFAULT_PRIORITY
from tersely.domain.history.readable import format_message
from tersely.domain.history.sessions import Session
from tersely.domain.history.turns import write_turn_id
from tersely.domain.messages import searchable_text, with_all_calls
from tersely.service.sessions.compactions import CompactionOptions, Compactions
from tersely.service.sessions.messages import dialect_of
from tersely.service.sessions.notes import Notes
from tersely.service.sessions.pins import Pins
from tersely.service.sessions.previews import PreviewRequest, Previews, as_text
from tersely.service.sessions.sessions import SessionChange, Sessions
from tersely.store.commit.turns import TurnRow
from tersely.store.db.connection import Database
from tersely.store.history import messages
from tersely.store.history.messages import StoredMessage
from tersely.strategies.presets import STRATEGIES

# A strategy's own name for "the last N turns".
WINDOWS = {"window": "context_size", "slim": "recent_turns", "trim": "max_context_turns"}
# CowAgent's names.
AGENT_PREFIX = "agent_"
MAX_SHOWN = 1_000
KEPT = "History and memory stay."
LIMIT = 15.0


class Commands:
    """Answers chat commands within a tenant and one of its sessions. They are not stored as conversation."""

    def __init__(
        self,
        database: Database,
        *,
        sessions: Sessions,
        previews: Previews,
        compactions: Compactions,
        notes: Notes,
        pins: Pins,
        strategy: str,
        epoch: str,
    ) -> None:
        """``strategy`` and ``epoch`` are the configured defaults."""
        self._database = database
        self._sessions = sessions
        self._previews = previews
        self._compactions = compactions
        self._notes = notes
        self._marks = pins
        self._strategy = strategy
        self._epoch = epoch

    async def answer(
        self, tenant: str, session_id: str, text: str, options: CompactionOptions | None = None
    ) -> str | None:
        """Return the answer to a chat command; None if ``text`` is no command. Errors become text of the answer.

        ``options``: the model to call, for commands that need one.
        """
        if not is_command(text):
            return None
        try:
            return await self.run(tenant, session_id, parse_command(text), options or CompactionOptions())
        except TerselyError as error:
            return error.detail

    async def run(self, tenant: str, session_id: str, command: Command, options: CompactionOptions) -> str:
        """Run a command and return its text. Raises what the use cases raise, for callers with status codes."""
        match command.verb:
            case "context":
                return await self._context(tenant, session_id, options)
            case "show":
                return as_text(
                    await self._previews.build(tenant, session_id, _preview_request(options)), options.dialect
                )
            case "clear":
                report = await self._compactions.clear(tenant, session_id, options)
                return f"The context is empty now, {report.tokens_after:,} tokens with instructions and tools. " + KEPT
            case "window":
                return await self._set_window(tenant, session_id, command.number)
            case "rebuild":
                state = await self._compactions.rebuild_state(tenant, session_id, options)
                return state.text if state else "There is nothing to make a state of."
            case "drop" | "undo" | "remove":
                return await self._take_out(tenant, session_id, command)
            case "list":
                return await self._list(tenant, session_id, command.number)
            case "show turn":
                return await self._show_turn(tenant, session_id, command.number)
            case "scratchpad":
                return await self._scratchpad(tenant, session_id, command.value)
            case "help":
                return HELP
            case "config":
                return await self._config(tenant, session_id, command.key, command.value)
            case "pin" | "unpin" | "important":
                return await self._mark(tenant, session_id, command)

    async def _scratchpad(self, tenant: str, session_id: str, line: str) -> str:
        if not line:
            return (await self._notes.scratchpad(tenant, session_id)).text or "The scratchpad is empty."
        written = await self._notes.append_scratchpad(tenant, session_id, line)
        return f"Added. The scratchpad is now:\n{written.text}"

    async def _context(self, tenant: str, session_id: str, options: CompactionOptions) -> str:
        preview = await self._previews.build(tenant, session_id, _preview_request(options))
        read = dialect_of(options.dialect).read_message
        built = [read(raw) for raw in (*preview.instructions, *preview.messages)]
        roles = Counter(message.role for message in built)
        report = preview.report
        lines = [
            f"{len(built)} messages: {', '.join(f'{count} {role}' for role, count in roles.items()) or 'none'}",
            f"{sum(len(searchable_text(message)) for message in built):,} characters",
            f"{report.tokens_after:,} tokens, of {report.tokens_before:,} in all",
            *(f"  {layer.name}: {layer.tokens:,} tokens" for layer in report.layers),
            f"strategy {preview.strategy}, epoch {report.epoch} ({report.reason})",
        ]
        return "\n".join(lines)

    async def _take_out(self, tenant: str, session_id: str, command: Command) -> str:
        if command.verb == "remove":
            await self._sessions.remove(tenant, session_id, command.number)
            return f"{write_turn_id(command.number)} was removed for good."
        if command.verb == "undo":
            turn = await self._sessions.undo(tenant, session_id)
            return f"{write_turn_id(turn.turn)} was taken back."
        turn = await self._sessions.drop(tenant, session_id, command.number)
        return f"{write_turn_id(turn.turn)} is hidden from every context."

    async def _mark(self, tenant: str, session_id: str, command: Command) -> str:
        seq = command.number
        if command.verb == "important":
            await self._marks.set_priority(tenant, session_id, seq, command.priority)
            return f"Message {seq} has priority {command.priority}."
        is_pinned = command.verb == "pin"
        await self._marks.pin(tenant, session_id, seq, pinned=is_pinned)
        return f"Message {seq} {'stays in every context' if is_pinned else 'is no longer pinned'}."

    async def _list(self, tenant: str, session_id: str, count: int) -> str:
        session = await self._sessions.get(tenant, session_id)
        after = max(0, session.turns - count)
        rows, _ = await self._sessions.turns(tenant, session_id, after=after, limit=count)
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            openings = await messages.content(connection, tenant, session_id, [row.first_seq for row in rows])
        words = {opening.seq: _first_words(opening) for opening in openings}
        return "\n".join(_tell_turn(row, words.get(row.first_seq, "")) for row in rows) or "There are no messages yet."

    async def _show_turn(self, tenant: str, session_id: str, number: int) -> str:
        row = await self._sessions.turn(tenant, session_id, number)
        seqs = range(row.first_seq, min(row.last_seq, row.first_seq + MAX_SHOWN) + 1)
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            found = await messages.content(connection, tenant, session_id, seqs)
        shown = [_read(message) for message in found if message.turn == number and message.status == row.status]
        return "\n\n".join([_tell_turn(row, ""), *shown])

    async def _set_window(self, tenant: str, session_id: str, size: int) -> str:
        setting = _as_object(_strategy_of(await self._sessions.get(tenant, session_id)) or self._strategy)
        parameter = WINDOWS.get(str(setting["name"]))
        if parameter is None:
            raise InvalidRequest(
                f"{setting['name']} has no window of turns; {', '.join(WINDOWS)} have one: /config strategy window"
            )
        changed = await self._sessions.change(tenant, session_id, SessionChange(strategy={**setting, parameter: size}))
        return self._describe(changed)

    async def _config(self, tenant: str, session_id: str, key: str, value: str) -> str:
        session = await self._sessions.get(tenant, session_id)
        if key == "strategy":
            session = await self._sessions.change(tenant, session_id, SessionChange(strategy=value))
        elif key == "epoch":
            session = await self._sessions.change(tenant, session_id, SessionChange(epoch=value))
        elif key:
            setting = _as_object(_strategy_of(session) or self._strategy)
            parameter = key.removeprefix(AGENT_PREFIX)
            check_parameter(str(setting["name"]), parameter, value)
            setting[parameter] = _as_value(value)
            session = await self._sessions.change(tenant, session_id, SessionChange(strategy=setting))
        return self._describe(session)

    def _describe(self, session: Session) -> str:
        epoch = session.epoch_policy or session.last_epoch_policy or self._epoch
        return f"strategy: {_strategy_of(session) or self._strategy}\nepoch: {epoch}"


def _strategy_of(session: Session) -> str | None:
    """Return the session's own, or what its last call's header asked for."""
    return session.strategy or session.last_strategy


def check_parameter(strategy: str, parameter: str, value: str) -> None:
    """Raise `InvalidRequest` if ``strategy`` has no ``parameter``, and name the strategies that have it."""
    owners = [name for name, kind in STRATEGIES.items() if parameter in {each.name for each in fields(kind)}]
    if strategy not in STRATEGIES or strategy in owners:
        return
    if owners:
        switch = json.dumps({"name": owners[0], parameter: _as_value(value)})
        raise InvalidRequest(
            f"{parameter} is a parameter of {' and '.join(owners)}; this session's strategy is {strategy}. To change "
            f"the strategy too: /config strategy {switch}",
            field=parameter,
        )
    known = ", ".join(["strategy", "epoch", *(each.name for each in fields(STRATEGIES[strategy]))])
    raise InvalidRequest(f"there is no setting {parameter[:40]!r}; with {strategy} there are: {known}", field="key")


def _preview_request(options: CompactionOptions) -> PreviewRequest:
    return PreviewRequest(dialect=options.dialect, model=options.model, strategy=options.strategy, epoch=options.epoch)


def _tell_turn(row: TurnRow, words: str) -> str:
    weight = row.usage.weight if row.usage.weight is not None else row.tokens
    status = "" if row.status == "live" else f" ({row.status})"
    count = f"{row.messages} message{'' if row.messages == 1 else 's'}"
    return f"{write_turn_id(row.turn)}{status} · {count} · {weight:,} tokens  {words}".rstrip()


def _first_words(stored: StoredMessage, limit: int = 60) -> str:
    if not stored.raw:
        return ""
    text = " ".join(searchable_text(dialect_of(stored.dialect).read_reply(stored.raw)).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _read(stored: StoredMessage) -> str:
    """Return a message as people read it, under its number and its marks. The results of our own tools are shown, and
    so are the calls that they answer.
    """
    marks = [*(["pinned"] if stored.pinned else []), *([f"priority {stored.priority}"] if _is_marked(stored) else [])]
    title = f"message {stored.seq}" + (f" ({', '.join(marks)})" if marks else "")
    if not stored.raw:
        return f"{title}\n--- {stored.role} ---"
    read = dialect_of(stored.dialect).read_reply
    message = read(stored.raw)
    if stored.role == "assistant" and stored.model_raw is not None:
        message = with_all_calls(message, read(stored.model_raw))
    return f"{title}\n{format_message(message)}"


def _is_marked(stored: StoredMessage) -> bool:
    return stored.priority != DEFAULT_PRIORITY


def _as_object(setting: str) -> dict[str, Any]:
    found = json.loads(setting) if setting.lstrip().startswith("{") else {"name": setting.strip()}
    assert isinstance(found, dict)  # it was checked when it was set
    return found


def _as_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
