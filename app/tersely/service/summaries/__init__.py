"""Summaries in the background: jobs, models, writing, daily memory."""
