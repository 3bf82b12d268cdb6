"""Models in plain flax."""
