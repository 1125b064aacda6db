"""Second floor: balancers, each a way to make one loss of the losses of several tasks, and the optimizer around them."""
