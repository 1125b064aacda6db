"""Data that lie in files: reading, checking, fetching and making them up."""
