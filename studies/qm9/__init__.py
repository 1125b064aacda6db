"""The tables and figures of docs/qm9.md."""
