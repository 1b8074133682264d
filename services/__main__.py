"""``python -m penstock.services`` is the same as the command ``penstock``."""

from penstock.services.program import main

raise SystemExit(main())
