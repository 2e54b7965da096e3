"""A function under a policy beside the same function in float32."""
