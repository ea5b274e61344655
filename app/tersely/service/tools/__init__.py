"""Tersely's tools for models and agents."""
