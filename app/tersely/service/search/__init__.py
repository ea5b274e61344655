"""Searching stored sessions: text, relevance, embeddings, and SQL."""
