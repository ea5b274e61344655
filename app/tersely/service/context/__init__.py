"""From stored messages to the context of a call: load, plan, render."""
