"""Parts that the layers of both wings share."""
