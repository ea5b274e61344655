"""Replays of transcripts within the service: no model is asked, and no host is reached."""
