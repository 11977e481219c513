"""Load one or two servers, as `baton bench` does: `python -m benchmarks.serve --url http://127.0.0.1:8000 --help`."""

import sys

from deploy.bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
