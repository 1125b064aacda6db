"""Second floor: optimizers."""
