"""How models write tool calls: one file per syntax, each a machine over text that is still coming."""
