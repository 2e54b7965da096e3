"""A comparison as a table and as a chart."""
