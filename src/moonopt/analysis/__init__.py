"""Second floor: what task gradients say about conflict and stationarity, and what the theorems promise."""
