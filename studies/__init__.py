"""Studies: NAME.sh runs one, and ``python -m studies.NAME`` makes docs/NAME.md of its results."""
