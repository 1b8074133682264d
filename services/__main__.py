"""``python -m penstock.services`` is the same as the command ``penstock``."""

from penstock.services.cli import main

raise SystemExit(main())
