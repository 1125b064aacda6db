"""Ground floor: pure tensor functions, imported by every floor above."""
