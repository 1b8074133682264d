from __future__ import annotations

from penstock.services.worker.cpu_libraries import set_up_cpu_libraries

set_up_cpu_libraries()
