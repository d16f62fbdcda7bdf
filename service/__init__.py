"""Face recognition over HTTP: detect, embed, verify, and open-set identification against galleries."""
