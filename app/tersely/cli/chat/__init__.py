"""``tersely chat``."""
