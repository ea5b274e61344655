"""A scripted model host: `server` serves it, the other modules are the formats that it speaks."""

from app.upstream.scripted.chat import CHAT
from app.upstream.scripted.replies import Queues, Received, Script, ScriptedReply, Wire
from app.upstream.scripted.server import ScriptedModel, ScriptedServer, run_scripted, scripted_app

__all__ = [
    "CHAT",
    "Queues",
    "Received",
    "Script",
    "ScriptedModel",
    "ScriptedReply",
    "ScriptedServer",
    "Wire",
    "run_scripted",
    "scripted_app",
]
