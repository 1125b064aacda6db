"""The tables and the figure of docs/scenes-and-faces.md."""
