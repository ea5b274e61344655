"""Running the service: workers, the embedded database, the scripted model, and a server inside a command."""
