"""A run as a list of processes."""
