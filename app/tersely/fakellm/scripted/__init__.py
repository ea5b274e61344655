"""A scripted model host: `server` serves it, the other modules are its wire formats."""

from tersely.fakellm.scripted.openai_chat import CHAT
from tersely.fakellm.scripted.replies import Queues, ReceivedRequest, Script, ScriptedReply, WireFormat
from tersely.fakellm.scripted.server import ScriptedModel, ScriptedServer, run_scripted, scripted_app

__all__ = [
    "CHAT",
    "Queues",
    "ReceivedRequest",
    "Script",
    "ScriptedModel",
    "ScriptedReply",
    "ScriptedServer",
    "WireFormat",
    "run_scripted",
    "scripted_app",
]
