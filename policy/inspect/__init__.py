"""Reports on programs: their dtypes, hazards, errors and costs."""
