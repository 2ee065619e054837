"""The data, the model and the task of this project."""
