"""Knowledge about real clients: their ids, side calls, and traces of chat commands."""
