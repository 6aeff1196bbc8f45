"""`python -m trace_pl` is `trace-pl`; launchers such as torchrun start it so."""

import sys

from trace_pl.commands.main import main

sys.exit(main())
