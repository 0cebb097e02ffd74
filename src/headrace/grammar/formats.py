"""Formats of texts as regular expressions, each at most as wide as its standard."""

from __future__ import annotations

# Of years by the Gregorian rule: two digits divisible by four, but not the century's first year.
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
# Many programs know no year 0.
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY = "((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
# Leap seconds are left out: which minutes have one is in no pattern.
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"

MOMENTS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
"""Formats of RFC 3339."""
