"""Learn a face recogniser and a face detector, measure them, and write them as a model pack."""
