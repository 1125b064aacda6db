"""The tables and figures of docs/math-rl.md."""
