"""First floor: what task losses can be asked."""
