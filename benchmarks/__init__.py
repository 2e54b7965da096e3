"""Measurements beside upstream and peers. Run from the repository's root; nothing here is
installed.
"""
