"""How a layer mixes tokens of a packed step: attention, gated delta net, any module row by row."""
