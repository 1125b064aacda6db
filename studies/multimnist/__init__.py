"""The tables and figures of docs/multimnist.md."""
