"""Data that the packages share: token vocabularies, and the fields of messages that providers describe."""
