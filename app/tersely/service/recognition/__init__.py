"""Find the session of a request: hash its history and look it up."""
