"""Parts that the layers of both APIs share."""
