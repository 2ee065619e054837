"""Your code: the network, the loss and the steps, and the data."""
