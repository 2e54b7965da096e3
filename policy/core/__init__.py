"""Policies: their text, rules and scopes, the one in force, and the casts that it asks for."""
