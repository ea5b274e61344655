"""Runs agents' own SQL: a session's rows in SQLite, in child processes that can be killed."""
