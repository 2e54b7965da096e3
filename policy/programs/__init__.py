"""Programs as JAX traces them: the one place that reads and rebuilds jaxprs."""
