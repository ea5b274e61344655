"""Replies: relayed to the client in rounds, with the tools of Tersely run between them."""
