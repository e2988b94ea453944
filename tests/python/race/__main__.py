"""Run one race: python -m race DSN DIRECTORY SEED SECONDS."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from race.supervisor import run

print(json.dumps(run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
