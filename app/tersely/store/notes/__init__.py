"""Notes of sessions: state blocks, scratchpads, memos, memory, summaries."""
