"""Studies: scripts run them, and ``python -m studies.NAME`` makes the tables and figures of a page of their results."""
