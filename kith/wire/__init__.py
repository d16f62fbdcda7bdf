"""Request bodies, responses and shared literals of the REST API, one module per resource."""
