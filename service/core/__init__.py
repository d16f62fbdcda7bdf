"""Building blocks that every layer of the service uses."""
