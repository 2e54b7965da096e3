"""What an audit looks for: one idea a file, each a function from a program's flow to findings."""
