"""The cheapest rules that meet an error budget."""
