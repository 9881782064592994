"""Tests of everything; what several files share lies here."""

import gc
import sys

if "pytest" in sys.modules:
    gc.disable()  # conftest.py enables it when all is imported: a tenth of the suite's time went into looking for garbage
