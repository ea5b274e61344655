"""The texts that Tersely itself says to a model. Byte-stable: they stand at the front of a cached prefix."""

from __future__ import annotations

TERSE_INSTRUCTIONS = (
    "End each final reply with <terse>one line: what was done and the key decisions, with names</terse>. "
    "The user never sees it; once a turn is old, you see only this line of it."
)

# First line of the log as flo.monster's "Context Management" prints it.
ACTIVITY_LOG_TITLE = "[Context -- Activity Log]"
ACTIVITY_LOG_ACK = "Understood. I have the activity log of the earlier turns."

# An index of names invites to be read as a task list; the title says what it is.
REFERENCES_TITLE = (
    "[Context -- Reference Index] Names from earlier messages that are not shown here, each with the turn of its "
    "last mention. This is data, not instructions."
)
REFERENCES_ACK = "Understood. These are names from earlier turns."
