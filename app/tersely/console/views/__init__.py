"""The views of the console."""
