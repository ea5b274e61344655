"""The views of the console. Each reads through the service and renders one template."""

from __future__ import annotations

from tersely.console.pages import Pages
from tersely.console.router import Upload, View
from tersely.console.views.action_pages import ActionPages
from tersely.console.views.base import ViewServices
from tersely.console.views.live_pages import LivePages
from tersely.console.views.memory_pages import MemoryPages
from tersely.console.views.operator_pages import OperatorPages
from tersely.console.views.replay_pages import ReplayPages
from tersely.console.views.session_pages import SessionPages
from tersely.console.views.tenant_pages import TenantPages
from tersely.console.views.trial_pages import TrialPages
from tersely.service.replays.replays import MAX_BYTES


class Views:
    """All views, by their paths."""

    def __init__(self, pages: Pages, services: ViewServices) -> None:
        self._session = SessionPages(pages, services)
        self._trial = TrialPages(pages, services)
        self._action = ActionPages(pages, services)
        self._memory = MemoryPages(pages, services)
        self._operator = OperatorPages(pages, services)
        self._replay = ReplayPages(pages, services)
        self._live = LivePages(pages, services)
        self._tenant = TenantPages(pages, services)

    def views(self) -> dict[str, View]:
        """Path under ``/console`` -> view."""
        return {
            "sessions": self._tenant.list_sessions,
            "session": self._session.show_session,
            "session/rows": self._session.show_rows,
            "session/text": self._session.show_text,
            "replay/session/text": self._session.show_text,
            "session/tools": self._session.show_tools,
            "replay/session/tools": self._session.show_tools,
            "session/artifact": self._session.show_artifact,
            "sessions/children": self._tenant.show_children,
            "session/cache": self._session.show_cache,
            "session/try": self._trial.show_try,
            "session/memory": self._memory.show_session_memory,
            "session/hands": self._action.show_hands,
            "savings": self._tenant.show_savings,
            "live": self._live.show_live,
            "live/events": self._live.stream_live,
            "search": self._tenant.show_search,
            "memory": self._memory.show_memory,
            "operator": self._operator.show_operator,
            "replay": self._replay.show_replays,
            "replay/session": self._session.show_session,
            "replay/session/rows": self._session.show_rows,
            "replay/session/cache": self._session.show_cache,
            "replay/session/savings": self._session.show_session_savings,
            "replay/session/try": self._trial.show_try,
            "session/savings": self._session.show_session_savings,
        }

    def changes(self) -> dict[str, View]:
        """Path under ``/console`` -> what changes something."""
        return {
            "session/strategy": self._trial.set_strategy,
            "session/act": self._action.act,
            "session/artifact/delete": self._session.delete_artifact,
            "session/state": self._memory.put_state,
            "session/scratchpad": self._memory.put_scratchpad,
            "memory/memo": self._memory.delete_memo,
            "memory/new": self._memory.save_memo,
            "memory/edit": self._memory.edit_memo,
            "memory/day": self._memory.delete_day,
            "operator/key": self._operator.make_key,
            "operator/revoke": self._operator.revoke_key,
            "operator/limits": self._operator.set_limits,
            "operator/tenant": self._operator.make_tenant,
            "replay/demo": self._replay.play_demo,
            "replay/delete": self._replay.delete_replay,
        }

    def uploads(self) -> dict[str, tuple[Upload, int]]:
        """Map paths under ``/console`` to upload handlers, with the maximum of bytes of each."""
        return {"replay/play": (self._replay.play_file, MAX_BYTES)}
