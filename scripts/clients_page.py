"""Writes the part of docs/clients.md that is made from the records in src/headrace/clients.

scripts/clients_page.py            rewrites the page
scripts/clients_page.py --check    ends with 1 if that would change it
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from headrace.clients.record import Client, Endpoint  # noqa: E402
from headrace.clients.registry import CLIENTS  # noqa: E402
from headrace.clients.text import command_line  # noqa: E402

PAGE = ROOT / "docs" / "clients.md"
BEGIN = "<!-- scripts/clients_page.py writes from here … -->\n"
END = "<!-- … to here -->\n"
EXAMPLE = Endpoint("http://127.0.0.1:8080", "NAME", 32768, 8192, takes_images=True)
LANGUAGES = {".json": "json", ".yaml": "yaml", ".toml": "toml", ".env": "dotenv"}


def table() -> Iterator[str]:
    yield "| client | version | APIs | install |\n|---|---|---|---|\n"
    for client in CLIENTS.values():
        anchor = client.title.lower().replace(" ", "-")
        yield f"| [{client.title}](#{anchor}) | {client.version} | {', '.join(client.apis)} | `{client.install}` |\n"


def section(client: Client) -> Iterator[str]:
    yield f"\n## {client.title}\n\n`headrace launch {client.name}`, or by hand:\n"
    for file in client.lasting_settings(EXAMPLE).files:
        yield f"\n`{file.path}`\n\n```{LANGUAGES[Path(file.path).suffix]}\n{file.text}```\n"
    yield f"\n```sh\n{command_line(client, EXAMPLE)}\n```\n\n{client.notes}\n"


def page(present: str) -> str:
    before, _, rest = present.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = "".join([*table(), *(part for client in CLIENTS.values() for part in section(client))])
    return f"{before}{BEGIN}{made}\n{END}{after}"


def main() -> int:
    present = PAGE.read_text("utf-8")
    wanted = page(present)
    if "--check" in sys.argv[1:]:
        return int(present != wanted)
    PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
