"""Tersely's tools: their catalog and arguments."""
