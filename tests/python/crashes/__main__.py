"""Run one storm and judge it: python -m crashes KIND DIRECTORY SEED SECONDS."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from crashes.storm import run

print(json.dumps(run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
