"""Fifth floor: measurements against peers, each in the same run, as a table and as JSON."""
