"""Failures as data."""
