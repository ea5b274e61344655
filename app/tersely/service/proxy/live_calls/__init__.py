"""Calls that continue a live session: only what is new in them is worked out."""
