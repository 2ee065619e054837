"""The code of this project."""
