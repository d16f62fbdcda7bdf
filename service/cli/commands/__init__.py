"""Commands of ``kith``, one module per group.

Modules import slow packages inside the commands, so that help and completion stay fast.
"""
