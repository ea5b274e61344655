"""Requests to the model host: prepared ones, and those that go through unchanged."""
