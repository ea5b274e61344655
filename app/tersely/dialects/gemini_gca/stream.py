"""Code Assist's replies: Gemini's, each event inside of ``response``."""

from __future__ import annotations

from functools import partial

from tersely.dialects.gemini import stream as gemini

WRAPPER = "response"

ReplyStream = partial(gemini.ReplyStream, wrapper=WRAPPER)
