"""The head of a context: the layers that stand in front of the messages."""
