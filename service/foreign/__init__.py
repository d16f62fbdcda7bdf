"""Databases of other face recognition, turned into files that Kith takes."""
