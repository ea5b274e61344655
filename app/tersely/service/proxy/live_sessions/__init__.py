"""Live sessions: what a worker keeps of the conversations that it has seen lately."""
