"""Decoupled DiLoCo in JAX: independent learners, one synchronizer, no stops."""
