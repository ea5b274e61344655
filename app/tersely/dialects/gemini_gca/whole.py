"""Whole replies of Code Assist: Gemini's, inside of ``response``."""

from __future__ import annotations

from functools import partial

from tersely.dialects.gemini import whole as gemini
from tersely.dialects.gemini_gca.stream import WRAPPER

split_reply = partial(gemini.split_reply, wrapper=WRAPPER)
