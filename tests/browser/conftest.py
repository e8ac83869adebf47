"""One server, one run of the notebook and one Chromium for all browser tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # _jupyter by its plain name
