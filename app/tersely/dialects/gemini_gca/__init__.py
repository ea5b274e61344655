"""Code Assist (``/v1internal:...``): Gemini's requests and replies in a wrapping of their own.

``{"model", "project", "request": {...}}`` and ``{"response": {...}}``; messages are those of `tersely.dialects.gemini`.
"""
