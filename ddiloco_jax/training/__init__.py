"""An ordinary JAX trainer that does not know DiLoCo exists."""
