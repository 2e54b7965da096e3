"""The command line: ``python -m policy audit module:function``."""

from __future__ import annotations

import sys

from policy.command_line.command import main

if __name__ == "__main__":
    sys.exit(main())
