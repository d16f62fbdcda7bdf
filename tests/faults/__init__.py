"""Fault injection: no acknowledged write is lost. make test-faults repeats it, at other instants each time."""
