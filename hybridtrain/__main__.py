"""`python -m hybridtrain`."""

import sys

from hybridtrain.app import main

sys.exit(main())
