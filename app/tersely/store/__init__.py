"""Postgres: the longhand. Rows in, values out; decisions are made elsewhere."""
