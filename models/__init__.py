"""Model packs, inference runtimes, face geometry and risk estimation, shared by training and serving."""
