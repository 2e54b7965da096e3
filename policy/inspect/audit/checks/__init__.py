"""The checks of an audit: each file has functions from a program's flow to findings."""
