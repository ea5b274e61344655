"""Text: clipping, code fences, tags and state blocks, tool output."""
