"""The model's view of a message, stored as its difference from the client's view.

A reply that had a tag taken out of it differs from what the client was shown by that tag alone. So a row keeps the
bytes that stand between the beginning and the end that both views share, and how long these are. ``model_raw`` is set
where there is too little in common, and in rows of older code. Statements read the view with `model_raw`.
"""

from __future__ import annotations

from tersely.store.history.differences import apply_difference, difference

# Columns of `messages` after `model_raw`.
COLUMNS = ("model_prefix", "model_suffix", "model_middle")
# A difference must be so much shorter, in bytes. Views that are larger than this are not compared: it takes time.
LEAST_SAVED = 16
LARGEST = 1024 * 1024

ModelView = tuple[bytes | None, int | None, int | None, bytes | None]
"""The values of ``model_raw`` and `COLUMNS`."""


def columns_of(raw: bytes, model: bytes | None) -> ModelView:
    """Return how the model's view of a message is stored. None: it is the client's."""
    if model is None or max(len(raw), len(model)) > LARGEST:
        return model, None, None, None
    prefix, suffix, middle = difference(raw, model)
    if len(middle) > len(model) - LEAST_SAVED:
        return model, None, None, None
    return None, prefix, suffix, middle


def view_of(raw: bytes, stored: ModelView) -> bytes | None:
    """Return the model's view; the inverse of `columns_of`."""
    model, prefix, suffix, middle = stored
    if prefix is None or suffix is None or middle is None:
        return model
    return apply_difference(raw, prefix, suffix, middle)


def model_raw(table: str = "") -> str:
    """Return the expression for the model's view; NULL where it is the client's. ``table`` is put before each column.

    Older code that replaces both views knows nothing of the difference: it does not count for shorter bytes.
    """
    t = f"{table}." if table else ""
    return (
        f"CASE WHEN {t}model_middle IS NULL OR {t}model_raw IS NOT NULL THEN {t}model_raw "
        f"WHEN octet_length({t}raw) >= {t}model_prefix + {t}model_suffix THEN overlay({t}raw PLACING {t}model_middle "
        f"FROM {t}model_prefix + 1 FOR octet_length({t}raw) - {t}model_prefix - {t}model_suffix) END"
    )


def model_size(table: str = "") -> str:
    """Return the expression for the bytes of the model's view, which reads no content; NULL where there is none."""
    t = f"{table}." if table else ""
    return f"coalesce(octet_length({t}model_raw), {t}model_prefix + {t}model_suffix + octet_length({t}model_middle))"
