"""Tests of everything; what several files share lies here."""

import gc
import sys

if "pytest" in sys.modules:
    # conftest.py enables it when all is imported; looking for garbage again and again took a tenth of the time.
    gc.disable()
