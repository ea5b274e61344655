"""Writing: group commit, late writes and the spool, imports, turns, visibility."""
