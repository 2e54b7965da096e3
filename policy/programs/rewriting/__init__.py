"""Interpreters of jaxprs: they evaluate a program as another one."""
