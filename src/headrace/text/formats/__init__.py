"""Tool-call syntaxes: one file each, with an incremental parser."""
