"""Rows for searching: text pages, term pages, embeddings."""
