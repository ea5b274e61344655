"""Texts that replace removed turns: the activity log, the reference index, and summaries."""
