"""A scripted model host: `server` serves it, the other modules are its wire formats."""

from tersely.fakellm.scripted.openai_chat import CHAT
from tersely.fakellm.scripted.replies import Queues, Received, Script, ScriptedReply, Wire
from tersely.fakellm.scripted.server import ScriptedModel, ScriptedServer, run_scripted, scripted_app

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
