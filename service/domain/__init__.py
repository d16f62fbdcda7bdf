"""Domain model: entities, decisions, fusion, verification and hygiene."""
