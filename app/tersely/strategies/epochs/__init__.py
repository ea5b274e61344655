"""When an epoch starts and where it cuts."""
