"""The commands of ``kith``, a module for each group. They import what is slow where it is used: help and completion
need none of it (docs/decisions/0046)."""
