"""Parts of HTML pages that reports share."""
