"""Presentation attack detector: photos of live faces and of attacks, network and training loop."""
