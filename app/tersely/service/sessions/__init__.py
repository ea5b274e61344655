"""Sessions over REST: messages, exports, pins, commands, statistics, events, cleanup."""
