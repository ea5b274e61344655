"""Memos: tagged knowledge of a tenant, and the choice of memos for a message."""
