"""Model packs: manifest, catalog, download and verification."""
