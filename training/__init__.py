"""Learn a face recognizer and a face detector, measure them, and write them as a model pack."""
