"""Marks for what the oldest supported transformers (tests/packaging/lower_bounds.py) cannot do by itself."""

from __future__ import annotations

import pytest
import transformers

OLDEST = transformers.__version__.startswith("5.17.")
not_in_the_oldest = pytest.mark.skipif(OLDEST, reason="transformers 5.17 fails without this package")
