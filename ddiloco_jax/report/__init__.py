"""Reads tapes and metrics files; draws what happened."""
