"""The web page that `headrace serve` shows at `/`: its static files and its Markdown."""
