"""A session: its messages, turns, positions, hash chain, and how a request is matched with it."""
