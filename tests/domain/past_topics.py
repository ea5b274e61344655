"""A long conversation with ten topics in it, and references to them as users make them."""

from __future__ import annotations

from typing import Any

# Topic -> (what the user asked, the tool output, the reply). A mark stands in the tool output or the reply alone.
TOPICS: dict[str, tuple[str, str, str]] = {
    "payments": (
        "Deploy the payments service to staging and tell me how it goes.",
        'build ok\npush ok\nmigrate FAILED: relation "ledger_v2" already exists MARK-PAYMENTS\nexit code 1',
        "The payments deploy stopped at the migration step: the table ledger_v2 exists already.",
    ),
    "login": (
        "Users report that the login page logs them out after a minute. Find out why.",
        "auth/session.py:41: max_age=60  # MARK-LOGIN\nauth/cookies.py:12: secure=True",
        "The session cookie lives for 60 seconds: max_age in auth/session.py is in seconds, not minutes.",
    ),
    "invoice": (
        "The PDF invoices show the wrong VAT for Swiss customers.",
        "rates.yml: CH: 7.7  # MARK-INVOICE since 2018\nrates.yml: DE: 19",
        "Switzerland's rate is outdated: 7.7 instead of 8.1 per cent since January 2024.",
    ),
    "palette": (
        "Can you pick a colour palette for the landing page?",
        "palettes: forest, dusk, MARK-PALETTE terracotta",
        "I chose terracotta with warm greens; the accent is #c65d3b.",
    ),
    "search": (
        "Search on the catalogue is slow, profile it.",
        "p50 40 ms, p99 2100 ms: sequential scan on products.title MARK-SEARCH",
        "The ninety-ninth percentile comes from a missing trigram index on products.title.",
    ),
    "mail": (
        "Newsletters bounce for outlook.com addresses, look into the mail server's log.",
        "550 5.7.1 blocked MARK-MAIL: SPF record lists 203.0.113.7 only",
        "The SPF record misses the new relay, so Outlook rejects our mail.",
    ),
    "backup": (
        "Check whether last night's database backup can be restored.",
        "pg_restore: error: could not read block 5531 MARK-BACKUP",
        "The dump is damaged: the disk filled up at 03:12 and the archive was cut short.",
    ),
    "mobile": (
        "The Android app crashes when the camera opens.",
        "java.lang.SecurityException: Permission Denial MARK-MOBILE: CAMERA",
        "The manifest lacks the camera permission since the Gradle upgrade.",
    ),
    "contract": (
        "Summarise the termination clause of the Nordwind contract.",
        "section 14.2 MARK-CONTRACT: ninety days to the end of a quarter",
        "Nordwind can be terminated with ninety days' notice to the end of a quarter.",
    ),
    "kubernetes": (
        "Pods in the kubernetes cluster get evicted at noon, what is going on?",
        "Evicted: node ip-10-0-3-17 low on ephemeral-storage MARK-KUBERNETES",
        "The nightly report job leaves 40 GB in emptyDir until noon.",
    ),
}
MARKS = {topic: f"MARK-{topic.upper()}" for topic in TOPICS}
REFERENCES = [
    ("back to the payments service deploy: which step failed?", "payments"),
    ("What was the reason for the login page problem again?", "login"),
    ("Remember the logout after a minute? Where is that value set?", "login"),
    ("Which VAT rate did the Swiss invoices have?", "invoice"),
    ("Earlier we talked about a colour palette. What was the accent?", "palette"),
    ("How slow was the catalogue search at the 99th percentile?", "search"),
    ("Let's return to the newsletters that bounce at Outlook. What did the log say?", "mail"),
    ("About the backup that could not be restored: which block was it?", "backup"),
    ("the android camera crash, what was the exception?", "mobile"),
    ("And the Nordwind contract, how long is the notice period for termination?", "contract"),
    ("Why did those pods get evicted, once more?", "kubernetes"),
    ("For the post mortem: when did the kubernetes evictions happen and on which node?", "kubernetes"),
    ("Can you open the file with the session cookie lifetime from this morning?", "login"),
    ("what was wrong with the SPF record", "mail"),
]
# Written when the rules were settled: no rule and no number was chosen by them.
HELD_OUT = [
    ("back to the payments deployment", "payments"),
    ("what did we say about Swiss VAT?", "invoice"),
    ("remind me of the accent colour", "palette"),
    ("which table made the migration fail?", "payments"),
    ("The eviction thing: how many GB was it?", "kubernetes"),
    ("Who was blocking our newsletters?", "mail"),
    ("that slow search, what index was missing?", "search"),
    ("Which permission did the phone app lack?", "mobile"),
    ("How many days' notice for Nordwind?", "contract"),
    ("When did the disk fill up during the backup?", "backup"),
    ("Is the cookie lifetime in seconds or minutes?", "login"),
    ("what did Outlook answer?", "mail"),
    ("Which colours did you pick?", "palette"),
    ("the crash on Android: what changed with Gradle?", "mobile"),
    ("what was the p99 again", "search"),
    ("did the deploy to staging succeed?", "payments"),
    ("What were the rates for Switzerland and Germany?", "invoice"),
    ("can the database be restored now?", "backup"),
    ("termination clause, quote section 14.2", "contract"),
    ("why are people logged out so quickly?", "login"),
]
# What is talked about between and after the topics: ordinary work with words that occur everywhere.
CHORES = (
    ("Rename the helper in utils to format_amount.", "3 files changed", "Renamed it in three files, all tests pass."),
    ("Add a test for empty baskets.", "1 passed", "Added the test to the basket suite; it passes."),
    ("Why does the linter complain about line 88?", "E501 line too long", "The line has 132 characters, I wrapped it."),
    ("Write a changelog entry for this week.", "CHANGELOG.md updated", "The entry lists the five merged changes."),
    ("Update the dependencies, please.", "12 packages updated", "Twelve packages are up to date now, nothing broke."),
    ("What is left on the list for today?", "todo: docs, review", "The docs and one review are left for today."),
    (
        "Explain how the basket total is computed.",
        "def total(self)",
        "It adds all prices and the shipping.",
    ),
    ("Make the button on the settings screen bigger.", "settings.css changed", "The button is 48 pixels high now."),
)


def conversation() -> list[dict[str, Any]]:
    """The topics, each followed by chores, and an hour of chores at the end, as wire messages of `openai_chat`."""
    messages: list[dict[str, Any]] = []
    for number, topic in enumerate(TOPICS):
        messages += _turn(f"t{number}", *TOPICS[topic])
        for chore in range(2):
            messages += _turn(f"c{number}_{chore}", *CHORES[(2 * number + chore) % len(CHORES)])
    for number in range(16):
        messages += _turn(f"e{number}", *CHORES[number % len(CHORES)])
    return messages


def _turn(name: str, question: str, output: str, reply: str) -> list[dict[str, Any]]:
    call = {"id": name, "type": "function", "function": {"name": "shell", "arguments": '{"command": "run"}'}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "content": output + "\n" + "0 1 2 3 4 5 6 7 8 9 " * 15},
        {"role": "assistant", "content": reply},
    ]
