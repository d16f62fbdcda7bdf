"""Use cases: one function each, from a request and its caller to a result. Routes parse, call and render."""
