"""The command line where each rank is on a host with its own disk: a folder per rank.

The folder is that of `forked_command`; a rank's working directory is `host<rank>` in it, from which
relative paths of the data count. `versions.json` there has versions to claim, by package.
"""

import json
import os
import socket
import sys
from pathlib import Path

from hybridtrain.cli import main

if __name__ == "__main__":
    host = f"host{os.environ['RANK']}"
    socket.gethostname = lambda: host
    os.chdir(Path(sys.argv[1]) / host)
    claimed = Path("versions.json")
    for name, version in json.loads(claimed.read_text() if claimed.exists() else "{}").items():
        __import__(name).__version__ = version
    sys.exit(main(sys.argv[2:]))
