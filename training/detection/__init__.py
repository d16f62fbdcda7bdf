"""Face detector: network, targets, training data and training loop."""
