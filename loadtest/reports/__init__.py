"""Tables on the terminal, JSON files, and the HTML page of ``penstock bench report``."""
