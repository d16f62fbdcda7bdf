"""Photos with annotated faces, by which detectors are measured."""
