"""Every fault: clients of all dialects against the real service, while its parts are killed, stopped and filled."""
