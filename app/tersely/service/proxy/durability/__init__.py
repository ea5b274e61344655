"""Replies reach the database, or a spool on disk, before a client sees their end."""
