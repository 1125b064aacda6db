"""Networks that several benchmarks train."""
