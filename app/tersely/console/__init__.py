"""The console: pages in which people look at sessions, calls, savings and what is going on."""
