"""Texts for measuring a prediction head: prose, a list and code."""

from __future__ import annotations

_PROSE = (
    "The harbour office opens at seven, long before the first ferry comes in. Someone has to sweep the steps, read the "
    "barometer and write the day's weather on the board beside the door. For eleven years that was Martha Quill, who "
    "knew every skipper by the sound of the engine and could tell from the gulls whether the wind would turn before "
    "noon. When she retired, the town gave her a brass clock and a small boat. She sold the clock and kept the boat, "
    "and on most mornings she can be seen rowing out past the breakwater, because, as she says, somebody still has to "
    "look at the weather. In the"
)

_LIST = """Things to bring for the walk on Saturday:

1. Water, at least two litres for each person
2. Bread, cheese and apples
3. A map of the northern hills and a compass
4. Rain jackets, because the forecast changes every day
5. A torch with fresh batteries
6. Plasters and a bandage

Things to do before we leave:

1. Feed the cat
2. Close all windows
3."""

_CODE = '''def read_table(path):
    """Rows of a comma-separated file as dictionaries, by the names in its first line."""
    rows = []
    with open(path, encoding="utf-8") as file:
        names = file.readline().strip().split(",")
        for line in file:
            values = line.strip().split(",")
            rows.append(dict(zip(names, values)))
    return rows


def write_table(path, rows):
    """Write dictionaries that have the same keys as a comma-separated file."""
    names = list(rows[0])
    with open(path, "w", encoding="utf-8") as file:
'''

TEXTS = (_PROSE, _LIST, _CODE)
"""The model continues these."""
