"""Where an agent's own SQL runs: a session's rows in SQLite, in child processes that can be killed."""
