"""An audit as text and as HTML."""
