"""The protocol as values: receipts, names and times in, decisions out."""
