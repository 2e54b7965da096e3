"""An estimate as text, as an HTML page and as a plot."""
