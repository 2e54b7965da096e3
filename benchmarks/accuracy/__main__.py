import sys

from benchmarks.accuracy import main

sys.exit(main())
