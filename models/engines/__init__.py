"""Selection of the runtime, precision and device for each network."""
