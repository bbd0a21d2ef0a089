"""`python -m topw_deploy` is the command `topw`."""

import sys

from topw_deploy.cli.main import main

sys.exit(main())
