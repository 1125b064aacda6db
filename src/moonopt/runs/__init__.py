"""Running benchmarks: settings, training, checkpoints, many cells at once, reports."""
