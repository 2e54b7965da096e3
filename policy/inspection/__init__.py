"""What a program really runs in, read before it runs."""
