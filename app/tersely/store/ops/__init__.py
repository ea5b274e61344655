"""Rows for operation: keys, tenants, events, figures, breakers, cleanup."""
