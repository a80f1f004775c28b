"""`python -m hybridtrain`."""

import sys

from hybridtrain.app.cli import main

sys.exit(main())
