"""The contract between training and serving: packs, networks, geometry and risk."""
