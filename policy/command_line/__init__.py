"""The command line: ``python -m policy audit module:function``."""
