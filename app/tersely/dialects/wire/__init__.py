"""Reading and writing of wire formats that several dialects share: JSON, server-sent events, media."""
