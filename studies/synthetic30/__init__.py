"""The tables and the figure of docs/synthetic30.md."""
