"""Stages that make a context smaller: shortening, archiving, trimming, compaction, memory levels."""
