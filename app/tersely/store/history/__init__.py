"""Reading sessions and their messages."""
