"""Request models with validation, and conversion of domain objects to the client's response models."""
