"""Measures functions under a policy against the same functions in float32."""
