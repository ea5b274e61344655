"""The record of a call: its messages, its report and its figures."""
