"""The run that the tests of the utility benchmark are about."""

from __future__ import annotations

from benchmarks.utility.settings import Settings

RUN = Settings("rt", "tiny", "raptor", 8.0, 0)
RECORDS = 7_500
