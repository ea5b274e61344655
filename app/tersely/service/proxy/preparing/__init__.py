"""The full path: from a request to the body for the model host."""
