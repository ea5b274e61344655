"""Scripted and strict model hosts, for use without a key and for tests. Imports nothing of the service."""
