"""What travels: fragments as bytes, messages, errors."""
