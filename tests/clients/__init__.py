"""The programs of docs/clients.md, installed, run against Tersely and checked: `python -m tests.clients`."""
