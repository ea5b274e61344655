"""HTTP below the routes: limits, request ids, log lines, shutdown."""
