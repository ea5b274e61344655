"""The console: web pages about sessions, calls, savings and current activity."""
