"""Training loop, objective, checkpoints and logs."""
