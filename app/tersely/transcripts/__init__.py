"""Transcripts of agents' conversations: recorded requests, and the files that agents leave on disk."""
