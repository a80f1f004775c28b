"""The command line in a process of `forked`: a folder for its output, then its arguments."""

import sys

from hybridtrain.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
