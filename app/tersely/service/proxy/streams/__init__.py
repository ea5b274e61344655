"""Streamed replies: read within a limit, with their end held back until the reply is on disk."""
