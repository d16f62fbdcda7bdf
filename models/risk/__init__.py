"""Error rates of similarity thresholds."""
