"""Studies of many runs: tables, paired tests, figures, and one page with all of them."""
