"""`python -m stepspec.evaluation.report`: see `stepspec.evaluation.report.readme`."""

import sys

from stepspec.evaluation.report.readme import main

sys.exit(main())
