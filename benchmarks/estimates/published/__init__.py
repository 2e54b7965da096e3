"""Step times that others measured and published, beside `policy.estimate`."""
