"""The tables of a report and of the console, each declared once as a list of fields."""
