"""The start of epochs, and their cuts."""
